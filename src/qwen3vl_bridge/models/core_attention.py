"""Core attention without Transformer Engine: packed-sequence parameters, kernels, and the module.

`transformer_impl` (by default `settings.default_transformer_impl`) decides which it is. Transformer Engine chooses its
own kernels; here it is torch's varlen attention where that takes the inputs, otherwise `_sdpa`.

Nothing here allocates memory of size tokens x tokens.
Legend: n segments, s their length, t tokens of a packed row, d head dimension; keys and values may have fewer heads.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from qwen3vl_bridge.batch.token_layout import CausalChunks, SequenceLayout, causal_chunks
from qwen3vl_bridge.parallel.collectives import gather_over_context

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right


@dataclass
class HostPackedSeqParams(PackedSeqParams):
    """Packed-sequence parameters that also hold the physical (padded) segment lengths on the host.

    With `lengths`, attention that iterates over segments needs no host-device synchronization. `layout` tells attention
    under context parallelism which rank has which tokens; it is None for the tower's frames, which are not split.
    """

    lengths: tuple[int, ...] = ()
    layout: SequenceLayout | None = None
    _chunks: dict[tuple[int, int], CausalChunks] = field(default_factory=dict, init=False, repr=False, compare=False)

    def chunks(self, cp_size: int, cp_rank: int) -> CausalChunks:
        """`causal_chunks` of the layout, computed by the first layer and cached for all others."""
        if (cp_size, cp_rank) not in self._chunks:
            self._chunks[cp_size, cp_rank] = causal_chunks(self.layout, cp_size, cp_rank)
        return self._chunks[cp_size, cp_rank]


def packed_seq_params(
    cu_seqlens: Tensor, lengths: tuple[int, ...], layout: SequenceLayout | None = None
) -> HostPackedSeqParams:
    """Megatron's description of one packed row, with physical offsets [n + 1] int32 only.

    Physical offsets are sufficient: attention is causal and padding is at the end of a segment, so no real token
    attends to padding, and the outputs of padding are excluded from losses and from experts' token counts. If logical
    lengths were also given, Transformer Engine would treat the difference as gaps between segments
    (`pad_between_seqs`), which FlashAttention does not support there, and which no backend supports on some devices and
    in float32. All four offsets are the same tensor, so that Transformer Engine has nothing to compare.
    """
    longest = max(lengths)
    cu_seqlens.lengths = lengths  # pyright: ignore[reportAttributeAccessIssue]  for kernels that get only offsets
    return HostPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,
        lengths=lengths,
        layout=layout,
    )


def layout_packed_seq_params(layout: SequenceLayout) -> HostPackedSeqParams | None:
    """Megatron's packed-sequence parameters for a layout: set for a packed row, None for padded rows."""
    return packed_seq_params(layout.cu_seqlens_padded, layout.padded_lengths, layout) if layout.packed else None


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

_VARLEN = frozenset(inspect.signature(varlen_attn).parameters if varlen_attn is not None else ())
if not {"scale", "window_size"} <= _VARLEN:  # its first releases
    varlen_attn = None

_ALIGNED = 8  # varlen attention needs head dimensions divisible by this; scaled_dot_product_attention pads


def flash_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch's FlashAttention supports [n, heads, s, d]: on CUDA, in 16 bits, if the device supports d.

    torch decides, including whether the user has disabled FlashAttention. It supports fewer key heads natively.
    """
    grouped = query.size(1) != key.size(1)
    return query.is_cuda and can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, grouped))


def varlen_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether varlen attention supports a packed row [t, heads, d]: needs FlashAttention and no dropout."""
    if varlen_attn is None or dropout or query.size(-1) % _ALIGNED:
        return False
    return flash_takes(*(x.transpose(0, 1)[None] for x in (query, key, value)), dropout)


def attend_end(query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float) -> Tensor:
    """Causal attention of the last s tokens of segments [n, heads, s, d] to all of their tokens [n, heads, keys' s, d].

    CUDA kernels align the causal mask to the end of the keys. The CPU kernel would need an explicit mask, which
    autograd would save: there, queries of zeros come before the last ones.
    """
    if query.is_cuda:
        mask = causal_lower_right(query.size(2), key.size(2))
        return _sdpa(query, key, value, attn_mask=mask, scale=scale, dropout=dropout)
    before = key.size(2) - query.size(2)
    whole = F.pad(query, (0, 0, before, 0))
    return _sdpa(whole, key, value, is_causal=True, scale=scale, dropout=dropout)[:, :, before:]


_KERNELS = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, **arguments: object) -> Tensor:
    """scaled_dot_product_attention of [n, heads, s, d] by a kernel that does not store all scores.

    On CUDA inputs that FlashAttention does not support (such as float32) use the memory-efficient kernel, which needs
    as many key heads as query heads: with fewer, torch would fall back to the math kernel. Of the kernels that the user
    has left on, cuDNN's is never taken, which torch prefers in 16 bits on an H100: it makes a plan for each shape, and
    the lengths of segments change with each batch.
    """
    groups = query.size(1) // key.size(1)
    if groups > 1 and query.is_cuda and not flash_takes(query, key, value, dropout):
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    allowed = [kernel for kernel, is_on in _KERNELS.items() if is_on()]
    with sdpa_kernel(allowed) if query.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, enable_gqa=groups > 1, **arguments)


class SegmentAttention(MegatronModule):
    """Core attention that processes padded rows as one batch, and packed rows in one call or segment by segment.

    FlashAttention supports packed rows directly. Where it is not available, adjacent segments of equal length are
    batched. Padding at the end of a segment needs no mask, because attention is causal or (vision) there is none.

    Under context parallelism each segment is divided into 2 * cp chunks, of which a rank holds two (`token_index`).
    Keys and values are all-gathered once per layer; each of the two chunks attends to all tokens up to its end.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is not None:
            self.tp_group = pg_collection.tp  # read by activation checkpointing
        self.ranks = config.context_parallel_size  # context-parallel size; 1 in the vision tower
        self.group = pg_collection.cp if self.ranks > 1 else None
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of [s, b, heads, d] rows to [s, b, heads * d], or of a packed row [t, heads, d] to [t, heads * d].

        Raises:
            ValueError: a mask or a bias is given; this module supports only causal and full attention within segments.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "attention_mask and attention_bias must be None: padding is described by the sequence layout"
            )
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if packed_seq_params is None:
            inputs = (x.permute(1, 2, 0, 3) for x in (query, *self._of_all_ranks(key, value)))
            return self._attend(*inputs, causal).permute(2, 0, 1, 3).flatten(2)
        lengths = physical_lengths(packed_seq_params, self.ranks * len(query))
        known = self.ranks == 1 or getattr(packed_seq_params, "layout", None) is not None
        if known and varlen_takes(query, key, value, self._rate()):
            return self._attend_row(query, key, value, packed_seq_params, lengths, causal).flatten(1)
        key, value = self._of_all_ranks(key, value)
        runs, start = [], 0
        for whole, same in groupby(lengths):
            n, length = sum(1 for _ in same), whole // self.ranks
            stop = start + n * length
            segments = (x[start:stop].view(n, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            runs.append(self._attend(*segments, causal).transpose(1, 2).flatten(0, 1))
            start = stop
        return torch.cat(runs).flatten(1)

    def _attend_row(
        self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams, lengths: tuple[int, ...], causal: bool
    ) -> Tensor:
        """Attention of a packed row [t, heads, d] in one call, without a host-device synchronization."""
        if self.ranks == 1:
            offsets, longest = (physical_offsets(params),) * 2, (max(lengths),) * 2
        else:  # each chunk is a segment of queries whose keys end at the end of the chunk
            chunks = params.chunks(self.ranks, self.group.rank())
            gathered = gather_over_context(torch.cat((key, value), -1), self.group).flatten(0, 1)  # [cp t, heads, 2 d]
            # The gradient of this indexing sums at most two terms per token, so the order of summation does not matter.
            key, value = gathered.index_select(0, chunks.keys).chunk(2, -1)
            offsets, longest = chunks.offsets, chunks.longest
        window = (-1, 0) if causal else (-1, -1)  # a causal mask is aligned to the end of the keys
        # torch 2.11 takes fewer key heads without being told.
        heads = {"enable_gqa": query.size(1) != key.size(1)} if "enable_gqa" in _VARLEN else {}
        return varlen_attn(query, key, value, *offsets, *longest, scale=self.scale, window_size=window, **heads)

    def _of_all_ranks(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """[..., heads, d] of this rank's tokens -> [..., cp * heads, d] of all context-parallel ranks' tokens.

        They have the same segment layout on every rank, so the other ranks' are concatenated along the heads.
        """
        if self.ranks == 1:
            return key, value
        gathered = gather_over_context(torch.cat((key, value), -1), self.group)  # [cp, ..., heads, 2 d]
        return gathered.movedim(0, -3).flatten(-3, -2).chunk(2, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Attention of queries [n, heads, length, d] to keys and values [n, cp * heads, length, d]; may be fewer heads.

        Under context parallelism it is causal: the text model's.
        """
        if self.ranks == 1:
            return self._call_kernel(_sdpa, query, key, value, is_causal=causal)
        key, value = (self._in_order(x) for x in (key, value))
        chunk, rank = query.size(2) // 2, self.group.rank()
        attended = []
        for own, before in zip(query.split(chunk, 2), (rank, 2 * self.ranks - 1 - rank), strict=True):
            seen = (before + 1) * chunk
            attended.append(self._call_kernel(attend_end, own, key[:, :, :seen], value[:, :, :seen]))
        return torch.cat(attended, 2)

    def _in_order(self, x: Tensor) -> Tensor:
        """[n, cp * heads, 2 c, d] of all ranks' tokens -> [n, heads, 2 cp c, d] in the order of the segment."""
        first, second = x.unflatten(1, (self.ranks, -1)).chunk(2, 3)  # [n, cp, heads, c, d]: chunk r, and its mirror
        return torch.cat((first, second.flip(1)), 1).transpose(1, 2).flatten(2, 3)

    def _call_kernel(self, kernel: Callable[..., Tensor], *tensors: Tensor, **arguments: Any) -> Tensor:
        dropout = self._rate()
        # Tensor-parallel ranks hold different heads and need different dropout masks.
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            return kernel(*tensors, scale=self.scale, dropout=dropout, **arguments)

    def _rate(self) -> float:
        return self.dropout if self.training else 0.0


def physical_offsets(params: PackedSeqParams) -> Tensor:
    """[n + 1] int32, cumulative physical segment lengths of a packed row."""
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded


def physical_lengths(params: PackedSeqParams, tokens: int) -> tuple[int, ...]:
    """Physical segment lengths of a packed row; synchronizes with the device only for parameters created elsewhere."""
    if isinstance(params, HostPackedSeqParams):
        lengths = params.lengths
    else:
        lengths = tuple(physical_offsets(params).diff().tolist())
    if sum(lengths) != tokens:
        raise ValueError(f"packed segments hold {sum(lengths)} tokens, the row has {tokens}")
    return lengths
