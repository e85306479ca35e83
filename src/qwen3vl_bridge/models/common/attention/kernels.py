"""Selection of torch's attention kernels, and calls of them that never allocate memory of size T x T.

What lives here: the selection, and the calls. What may not: the layout of packed rows (`batch/token_layout.py`),
modules (`segments.py`, `context_parallel.py`).

Legend: n segments, s their length, t tokens of a packed row, d head dimension; keys and values may have fewer heads.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

_ASKED = {"scale", "window_size", "enable_gqa"}  # missing in its first releases
if varlen_attn is not None and not inspect.signature(varlen_attn).parameters.keys() >= _ASKED:
    varlen_attn = None

_ALIGNED = 8  # varlen attention needs head dimensions divisible by this; scaled_dot_product_attention pads


def flash_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch's FlashAttention supports [n, heads, s, d]: on CUDA, in 16 bits, if the device supports d.

    torch decides, including whether the user has disabled FlashAttention. It supports fewer key heads natively.
    """
    grouped = query.size(1) != key.size(1)
    return query.is_cuda and can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, grouped))


def varlen_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether `attend_row` supports a packed row [t, heads, d]: needs FlashAttention and no dropout."""
    if varlen_attn is None or dropout or query.size(-1) % _ALIGNED:
        return False
    return flash_takes(*(x.transpose(0, 1)[None] for x in (query, key, value)), dropout)


def attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention within all segments of a packed row in one call, without a host-device synchronization.

    Args:
        query: [t, heads, d].
        key, value: [keys' t, heads, d].
        offsets: [n + 1] int32 each: cumulative segment lengths of queries and of keys.
        longest: the maximum segment length of queries, and of keys.
        causal: whether a segment's queries are aligned to the end of its keys and attend only up to their own position.
        scale: softmax scale.

    Returns:
        [t, heads, d].
    """
    window = (-1, 0) if causal else (-1, -1)
    grouped = query.size(1) != key.size(1)
    return varlen_attn(query, key, value, *offsets, *longest, scale=scale, window_size=window, enable_gqa=grouped)


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, dropout: float) -> Tensor:
    """Attention within [n, heads, s, d] segments of equal length; if causal, queries and keys are the same tokens."""
    return _product(query, key, value, is_causal=causal, scale=scale, dropout_p=dropout)


def attend_end(query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float) -> Tensor:
    """Causal attention of the last s tokens of segments to all of their tokens.

    CUDA kernels align the causal mask to the end of the keys. The CPU kernel would need an explicit mask, which
    autograd would save.

    Args:
        query: [n, heads, s, d].
        key, value: [n, heads, keys' s, d].
        scale, dropout: as in `attend`.
    """
    if query.size(2) == key.size(2):
        return attend(query, key, value, causal=True, scale=scale, dropout=dropout)
    if query.is_cuda or dropout:  # with dropout, the CPU saves all attention scores anyway
        mask = causal_lower_right(query.size(2), key.size(2))
        return _product(query, key, value, attn_mask=mask, scale=scale, dropout_p=dropout)
    return _EndOnCpu.apply(query, key, value, scale)


class _EndOnCpu(torch.autograd.Function):
    """Causal attention of a segment's last tokens: full attention to all earlier keys, and causal attention to their
    own.

    The two partial results are merged with their log-sum-exp weights. Given the merged output and log-sum-exp, the
    kernel's own backward pass returns the gradients of each part.
    Source: Dao et al., FlashAttention (2022), section 3.1; Liu et al., Ring Attention (2023).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        before = key.size(2) - query.size(2)
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, *(x[:, :, part] for x in (key, value)), is_causal=causal, scale=scale
            )
            for part, causal in ((slice(before), False), (slice(before, None), True))
        ]
        logarithm = torch.logaddexp(*(found[1] for found in parts))  # [n, heads, s] float32
        weighted = [out * (own - logarithm).exp()[..., None] for out, own in parts]
        attended = (weighted[0] + weighted[1]).to(query.dtype)
        ctx.save_for_backward(query, key, value, attended, logarithm)
        ctx.scale = scale
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attended, logarithm = ctx.saved_tensors
        before = key.size(2) - query.size(2)
        (query_before, *keys_before), (query_own, *keys_own) = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient,
                query,
                *(x[:, :, part] for x in (key, value)),
                attended,
                logarithm,
                0.0,
                causal,
                scale=ctx.scale,
            )
            for part, causal in ((slice(before), False), (slice(before, None), True))
        )
        keys = (torch.cat(parts, 2) for parts in zip(keys_before, keys_own, strict=True))
        return query_before + query_own, *keys, None


def _product(query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, **arguments: object) -> Tensor:
    """scaled_dot_product_attention with a kernel that does not store the scores of all queries and keys.

    On CUDA, inputs that FlashAttention does not support (such as float32) use the memory-efficient kernel, which needs
    as many key heads as query heads: with fewer, torch would fall back to the math kernel.
    """
    groups = query.size(1) // key.size(1)
    if groups > 1 and query.is_cuda and not flash_takes(query, key, value, dropout_p):
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, enable_gqa=groups > 1, **arguments)
