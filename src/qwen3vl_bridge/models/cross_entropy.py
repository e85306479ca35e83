"""The loss of logits in 16 bits without a copy of them in float32.

megatron-core's native fused loss, compiled for a GPU, reads and writes 43 bytes a logit and holds ten: the logits,
their exponentials and the softmax. Here the forward pass reads logits and keeps two numbers of each token, and the
backward pass reads them again and writes their gradient: 6 bytes, of which 4 are held. Each number is computed by the
same operations, in float32, as by megatron-core's unfused loss.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.compilation import run_by_token
from qwen3vl_bridge.parallel.collectives import max_in_group, sum_counts

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def cross_entropy(logits: Tensor, labels: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Losses [s, b] in float32 of labels [s, b] under logits [s, b, v / tp] of a tensor-parallel group."""
    first = group.rank() * logits.size(-1)
    return _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten() - first, group).view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """Losses [t] of logits [t, v / tp], and labels [t] counted from the rank's first."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        logits = logits.detach()  # or torch would compile once more where a gradient is wanted
        here, total, own = run_by_token(_statistics, logits, labels)
        largest = max_in_group(here, group)
        if group.size() > 1:
            total, own = sum_counts(torch.stack((total * (here - largest).exp(), own)), group)
        ctx.save_for_backward(logits, labels, largest, total)
        return total.log() - (own - largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return run_by_token(_gradient, *ctx.saved_tensors, gradient.contiguous()), None, None


def _statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token: the largest logit, the sum of exponentials relative to it, and the label's logit or 0."""
    exact = logits.float()
    largest = exact.amax(-1).clamp(min=torch.finfo(torch.float32).min)  # a rank may have padding alone
    total = (exact - largest[:, None]).exp().sum(-1)
    of_label = exact.gather(-1, labels.clamp(0, exact.size(-1) - 1)[:, None])[:, 0]
    return largest, total, torch.where((labels >= 0) & (labels < exact.size(-1)), of_label, 0.0)


def _gradient(logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
    softmax = (logits.float() - largest[:, None]).exp() / total[:, None]
    is_label = torch.arange(logits.size(-1), device=logits.device) == labels[:, None]
    return ((softmax - is_label.float()) * gradient[:, None]).to(logits.dtype)
