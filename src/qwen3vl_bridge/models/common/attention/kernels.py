"""torch's attention kernels: which one takes what, and how each is called so that nothing grows with T x T.

What lives here: that choice, and the calls. What may not: packed rows' layout (`batch/token_layout.py`), modules
(`segments.py`, `context_parallel.py`).

Legend: n segments, s their length, t tokens of a packed row, d of a head; keys and values may have fewer heads.
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

_ASKED = {"scale", "window_size", "enable_gqa"}  # that the first releases of it had not
if varlen_attn is not None and not inspect.signature(varlen_attn).parameters.keys() >= _ASKED:
    varlen_attn = None

_ALIGNED = 8  # numbers of a head that FlashAttention reads at once; scaled_dot_product_attention pads others


def flash_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch's FlashAttention takes [n, heads, s, d]: on CUDA, in 16 bits, if the device has it for such heads.

    torch itself knows, and whether somebody has turned it off. It then takes fewer heads of keys as they are.
    """
    grouped = query.size(1) != key.size(1)
    return query.is_cuda and can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, grouped))


def varlen_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether `attend_row` takes a packed row [t, heads, d]: FlashAttention does, which has no dropout there."""
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
    """All segments of a packed row by one call; the host waits for nothing.

    Args:
        query: [t, heads, d].
        key, value: [keys' t, heads, d].
        offsets: [n + 1] int32 each, where segments begin and the last one ends, among queries and among keys.
        longest: the longest segment of queries, and of keys.
        causal: whether a segment's queries are the last tokens of its keys, and see what lies before their own place.
        scale: of products.

    Returns:
        [t, heads, d].
    """
    window = (-1, 0) if causal else (-1, -1)
    grouped = query.size(1) != key.size(1)
    return varlen_attn(query, key, value, *offsets, *longest, scale=scale, window_size=window, enable_gqa=grouped)


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, dropout: float) -> Tensor:
    """[n, heads, s, d] of segments of one length; causal: queries and keys are the same tokens."""
    return _product(query, key, value, is_causal=causal, scale=scale, dropout_p=dropout)


def attend_end(query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float) -> Tensor:
    """Causal attention of the last s tokens of segments to all of their tokens.

    CUDA's kernels count from the end by themselves. The CPU's would want a mask, and autograd would keep it.

    Args:
        query: [n, heads, s, d].
        key, value: [n, heads, keys' s, d].
        scale, dropout: as for `attend`.
    """
    if query.size(2) == key.size(2):
        return attend(query, key, value, causal=True, scale=scale, dropout=dropout)
    if query.is_cuda or dropout:  # with which the CPU keeps all products anyway
        mask = causal_lower_right(query.size(2), key.size(2))
        return _product(query, key, value, attn_mask=mask, scale=scale, dropout_p=dropout)
    return _EndOnCpu.apply(query, key, value, scale)


class _EndOnCpu(torch.autograd.Function):
    """Causal attention of the last tokens of segments: all of the keys before them, and causally their own.

    The two are weighted by the sums of their exponentials. Given the result and the logarithm of both sums, the
    kernel's own backward pass gives the gradients of either part.
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
    """scaled_dot_product_attention by a kernel that keeps no product of all queries with all keys.

    On CUDA, what FlashAttention does not take (float32, for one) the memory-efficient kernel does, if there are as many
    heads of keys as of queries: with fewer, torch would fall back to plain products.
    """
    groups = query.size(1) // key.size(1)
    if groups > 1 and query.is_cuda and not flash_takes(query, key, value, dropout_p):
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, enable_gqa=groups > 1, **arguments)
