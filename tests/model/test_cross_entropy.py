"""Our fused loss is megatron-core's unfused one: bit for bit in one process, and over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

from qwen3vl_bridge.models.cross_entropy import cross_entropy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from tests.forked import results_of_ranks

TOKENS, VOCABULARY, PADDED = (40, 2), 500, 512


def examples(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits [40, 2, v], of which the last pad the vocabulary, and labels."""
    random = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(*TOKENS, PADDED, generator=random)).to(dtype)
    logits[..., VOCABULARY:] = -torch.inf
    return logits, torch.randint(0, VOCABULARY, TOKENS, generator=random)


def with_gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    losses = loss(leaf.clone())  # which megatron-core overwrites
    (losses * torch.arange(losses.numel()).view(losses.shape)).sum().backward()
    return losses.detach(), leaf.grad


def against_megatron(dtype: torch.dtype) -> bool:
    dist.init_process_group("gloo")
    group, (logits, labels) = dist.group.WORLD, examples(dtype)
    ours = with_gradient(lambda x: cross_entropy(x, labels, group), logits)
    theirs = with_gradient(lambda x: vocab_parallel_cross_entropy(x, labels, tp_group=group), logits)
    return all(map(torch.equal, ours, theirs))


def errors_of_ranks() -> list[float]:
    """Of losses and of the gradient, beside float64; the second rank has nothing but padding."""
    dist.init_process_group("gloo")
    group, (logits, labels) = dist.group.WORLD, examples(torch.float32)
    expected = with_gradient(
        lambda x: F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view(TOKENS), logits.double()
    )
    mine = logits if group.rank() == 0 else torch.full_like(logits, -torch.inf)
    losses, gradient = with_gradient(lambda x: cross_entropy(x, labels, group), mine)
    if group.rank():
        assert not gradient.any()
    gradients = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(gradients, gradient)
    found = losses, gradients[0]
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_process_is_megatrons(dtype):
    assert results_of_ranks(against_megatron, 1, dtype)


def test_tensor_parallel_ranks():
    """Measured at most 3e-7."""
    assert max(results_of_ranks(errors_of_ranks, 2)) <= 1e-6
