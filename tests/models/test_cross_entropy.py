"""The fused loss against megatron-core's unfused loss: bit for bit on one rank, on two ranks, and compiled."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from types import SimpleNamespace

from qwen3vl_bridge.models.common.loss import cross_entropy
from qwen3vl_bridge.upstream import dynamic_shapes

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch._dynamo.utils import counters

from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import allowed, check

TOKENS, VOCABULARY, PADDED = (40, 2), 500, 512


def examples(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits [40, 2, v] with padding of the vocabulary at the end, and labels."""
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
    """Return errors of losses and gradient against float64. The second rank has only padding."""
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
def test_cross_entropy_on_one_rank_equals_megatron_core(dtype):
    assert results_of_ranks(against_megatron, 1, dtype)


def test_cross_entropy_on_two_tensor_parallel_ranks_matches_torch():
    """Measured at most 3e-7."""
    assert max(results_of_ranks(errors_of_ranks, 2)) <= 1e-6


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy_compiles_once_for_all_lengths(monkeypatch, dtype):
    """Compiled for the CPU, with the same operations as on a GPU. Another rank has some of the labels."""
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    logits, labels = examples(dtype)
    labels[::3] += PADDED

    def exact(x: Tensor) -> Tensor:
        own = x.gather(-1, labels[: len(x), :, None] % PADDED)[..., 0]
        return x.logsumexp(-1) - torch.where(labels[: len(x)] < PADDED, own, 0.0)

    def errors(rows: int) -> dict[str, float]:
        found = with_gradient(lambda x: cross_entropy(x, labels[:rows], alone), logits[:rows])
        expected = with_gradient(exact, logits[:rows].double())
        relative = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
        return dict(zip(("losses", "gradient"), relative, strict=True))

    lengths = (TOKENS[0], 33, 17)
    limits = [allowed([errors(rows)]) for rows in lengths]
    monkeypatch.setattr(dynamic_shapes, "can_compile", lambda x: True)
    torch._dynamo.reset()
    counters.clear()
    for rows, limit in zip(lengths, limits, strict=True):
        check(errors(rows), limit)
    assert counters["stats"]["unique_graphs"] == 2  # of the forward and the backward pass
