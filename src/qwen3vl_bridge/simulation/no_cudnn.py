"""Replace Transformer Engine's cuDNN attention on the fake GPU, where cuDNN does not initialize."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from qwen3vl_bridge.config.fields import has_transformer_engine

import torch
from torch import Tensor


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Make cuDNN attention return uninitialized tensors of the right shapes, inside the `with` block."""
    if not has_transformer_engine():
        yield
        return
    from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel

    with ExitStack() as stack:
        for module in (backends, context_parallel):
            stack.enter_context(mock.patch.multiple(module, fused_attn_fwd=_forward, fused_attn_bwd=_backward))
        yield


def _heads(arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return queries, keys and values: the first three floating-point tensors among the arguments."""
    return [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()][:3]


def _forward(*arguments: Any, **_: Any) -> tuple[Tensor, list[Tensor]]:
    """Return uninitialized tensors: the output, and the log-sum-exp and random state for the backward pass."""
    query, _key, _value = _heads(arguments)
    # Packed rows [t, heads, d] have a log-sum-exp [t, heads, 1], padded rows [b, s, heads, d] one of [b, heads, s, 1].
    shape = (*query.shape[:-1], 1) if query.dim() == 3 else (query.size(0), query.size(2), query.size(1), 1)
    logsumexp = torch.empty(shape, dtype=torch.float32, device=query.device)
    return torch.empty_like(query), [logsumexp, torch.empty(2, dtype=torch.int64, device=query.device)]


def _backward(*arguments: Any, **_: Any) -> list[Tensor | None]:
    """Return uninitialized gradients of queries, keys and values, and None for the gradient of the bias."""
    return [*map(torch.empty_like, _heads(arguments)), None]
