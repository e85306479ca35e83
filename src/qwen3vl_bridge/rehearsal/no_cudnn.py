"""Transformer Engine's attention on the fake GPU, on which cuDNN cannot be created."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from qwen3vl_bridge.models.settings import has_transformer_engine

import torch
from torch import Tensor


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Give tensors of the shapes that Transformer Engine's attention by cuDNN would, without its kernels."""
    if not has_transformer_engine():
        yield
        return
    from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel

    with ExitStack() as stack:
        for module in (backends, context_parallel):
            stack.enter_context(mock.patch.multiple(module, fused_attn_fwd=_forward, fused_attn_bwd=_backward))
        yield


def _heads(arguments: tuple[Any, ...]) -> list[Tensor]:
    """Queries, keys and values come first among tensors of numbers that are not whole."""
    return [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()][:3]


def _forward(*arguments: Any, **_: Any) -> tuple[Tensor, list[Tensor]]:
    """Values, and what the backward pass needs: logarithms of sums and a state of the generator."""
    query, _key, _value = _heads(arguments)
    # [t, heads, 1] of a packed row [t, heads, d]; [b, heads, s, 1] of rows [b, s, heads, d].
    shape = (*query.shape[:-1], 1) if query.dim() == 3 else (query.size(0), query.size(2), query.size(1), 1)
    sums = torch.empty(shape, dtype=torch.float32, device=query.device)
    return torch.empty_like(query), [sums, torch.empty(2, dtype=torch.int64, device=query.device)]


def _backward(*arguments: Any, **_: Any) -> list[Tensor | None]:
    """Gradients of queries, keys and values, and of no bias."""
    return [*map(torch.empty_like, _heads(arguments)), None]
