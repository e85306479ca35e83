"""Core attention without Transformer Engine, and packed-sequence parameters with segment lengths on the host.

`transformer_impl="local"` selects this core attention. It supports padded rows and packed rows. It runs torch's varlen
attention if varlen attention supports the inputs, else scaled_dot_product_attention. Nothing here allocates memory of
size tokens x tokens.

Legend of shapes: n segments, s tokens of a segment, t tokens of a packed row, b rows of the batch, d head dimension,
c tokens of a context-parallel chunk. Keys and values may have fewer heads than queries.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from qwen3vl_bridge.core.collectives import gather_in_group
from qwen3vl_bridge.core.layout import CausalChunks, SequenceLayout, causal_chunks, locate_chunks
from qwen3vl_bridge.models.common.sdpa_kernels import allowed_kernels

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
from torch.nn.attention.bias import causal_lower_right


@dataclass
class HostPackedSeqParams(PackedSeqParams):
    """Packed-sequence parameters with the physical (padded) segment lengths on the host.

    Attention over segments then needs no host-device synchronization. Values derived from the lengths are computed in
    the first layer that needs them, and kept for other layers.

    Attributes:
        lengths: physical length of each segment.
        layout: determines which tokens each context-parallel rank holds. None in the vision tower, where every rank
            holds all tokens of its frames.
    """

    lengths: tuple[int, ...] = ()
    layout: SequenceLayout | None = None
    _causal_chunks: dict[tuple[int, int], CausalChunks] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _rank_chunks: dict[int, HostPackedSeqParams] = field(default_factory=dict, init=False, repr=False, compare=False)
    _chunk_indices: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def causal_chunks(self, cp_size: int, cp_rank: int) -> CausalChunks:
        """Return the queries and keys of a context-parallel rank, see `core.layout.causal_chunks`.

        They are computed only once.
        """
        if (cp_size, cp_rank) not in self._causal_chunks:
            self._causal_chunks[cp_size, cp_rank] = causal_chunks(self.layout, cp_size, cp_rank)
        return self._causal_chunks[cp_size, cp_rank]

    def rank_chunks(self, cp_size: int) -> HostPackedSeqParams:
        """Return packed-sequence parameters for a context-parallel rank's tokens, with each chunk as a segment.

        A rank has two consecutive chunks of each segment, each 1 / (2 * cp_size) of the segment's length. The
        parameters are computed only once.
        """
        if cp_size not in self._rank_chunks:
            lengths = (physical_offsets(self).diff() // (2 * cp_size)).repeat_interleave(2)
            offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            on_host = tuple(length // (2 * cp_size) for length in self.lengths for _ in range(2))
            self._rank_chunks[cp_size] = packed_seq_params(offsets, on_host)
        return self._rank_chunks[cp_size]

    def chunk_indices(self, size: int) -> Tensor:
        """Return [chunks, 2], the segment of each chunk of at most `size` tokens, and its index in the segment.

        This is the argument `chunk_indices` of flash-linear-attention's kernels. Computed only once per size.
        """
        if size not in self._chunk_indices:
            offsets, chunks = physical_offsets(self), sum(-(-length // size) for length in self.lengths)
            self._chunk_indices[size] = torch.stack(locate_chunks(offsets, chunks, size), 1).to(offsets.dtype)
        return self._chunk_indices[size]


def packed_seq_params(
    cu_seqlens: Tensor, lengths: tuple[int, ...], layout: SequenceLayout | None = None
) -> HostPackedSeqParams:
    """Return Megatron's packed-sequence parameters of one row of n segments.

    Args:
        cu_seqlens: physical (padded) offsets [n + 1] int32. Logical offsets are not needed: attention is causal and
            padding is at the end of a segment, so no real token attends to padding.
        lengths: physical lengths of the segments.
        layout: see `HostPackedSeqParams`.
    """
    # With logical lengths too, Transformer Engine would see gaps between segments (`pad_between_seqs`). Its
    # FlashAttention does not support gaps; on some devices and in float32 no backend does. All four offsets are the
    # same tensor, so that Transformer Engine has nothing to compare.
    longest = max(lengths)
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
    """Return Megatron's packed-sequence parameters of a batch; None if it has padded rows instead of a packed row."""
    return packed_seq_params(layout.cu_seqlens_padded, layout.padded_lengths, layout) if layout.packed else None


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

_VARLEN = frozenset(inspect.signature(varlen_attn).parameters if varlen_attn is not None else ())
if not {"scale", "window_size"} <= _VARLEN:  # first releases of varlen attention
    varlen_attn = None

_HEAD_DIM_MULTIPLE = 8  # varlen attention requires it; scaled_dot_product_attention pads heads


def supports_flash(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Return True if torch's FlashAttention supports these tensors [n, heads, s, d] and is not disabled.

    Key and value may have fewer heads than the query.
    """
    grouped = query.size(1) != key.size(1)
    return query.is_cuda and can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, grouped))


def supports_varlen(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Return True if torch's varlen attention, which needs FlashAttention, supports a packed row [tokens, heads, d]."""
    if varlen_attn is None or dropout or query.size(-1) % _HEAD_DIM_MULTIPLE:
        return False
    return supports_flash(*(x.transpose(0, 1)[None] for x in (query, key, value)), dropout)


def attend_last_tokens(query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float) -> Tensor:
    """Compute causal attention in each of n segments, where the queries are the last s tokens of the segment.

    Args:
        query: [n, heads, s, d].
        key, value: [n, heads, tokens of the segment, d].
        scale, dropout: as for scaled_dot_product_attention.
    """
    if query.is_cuda:
        mask = causal_lower_right(query.size(2), key.size(2))  # aligned to the end of the keys
        return _sdpa(query, key, value, attn_mask=mask, scale=scale, dropout=dropout)
    # The CPU kernel would need an explicit mask, which autograd would save. Zeros replace the earlier queries instead.
    before = key.size(2) - query.size(2)
    padded = F.pad(query, (0, 0, before, 0))
    return _sdpa(padded, key, value, is_causal=True, scale=scale, dropout=dropout)[:, :, before:]


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Compute attention of queries to the keys for which `mask` is True, without storing all scores.

    Args:
        query: [n, heads, s, d].
        key, value: [n, key heads, t, d].
        mask: [s, t] bool, with at least one True in each row.
        scale: as for scaled_dot_product_attention.
    """
    groups = query.size(1) // key.size(1)
    if query.is_cuda and groups > 1:
        # FlashAttention supports no masks, and the memory-efficient kernel needs as many key heads as query heads.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return _sdpa(query, key, value, attn_mask=mask, scale=scale, dropout=0.0)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, **arguments: object) -> Tensor:
    """Call scaled_dot_product_attention on [n, heads, s, d] with a kernel that does not store all scores."""
    groups = query.size(1) // key.size(1)
    if groups > 1 and query.is_cuda and not supports_flash(query, key, value, dropout):
        # The memory-efficient kernel (in float32, for example) needs as many key heads as query heads. With fewer,
        # torch would use the math kernel.
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    with allowed_kernels() if query.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, enable_gqa=groups > 1, **arguments)


class SegmentAttention(MegatronModule):
    """Core attention within segments, with torch's kernels. A segment is a padded row or a document of a packed row.

    FlashAttention computes a packed row in one call. Without it, there is one call for each run of adjacent segments of
    equal length. All padded rows are one call. Padding at the end of a segment needs no mask: text attention is causal,
    and frames of the vision tower have no padding.

    Under context parallelism each segment is divided into 2 * cp chunks, and a rank holds two of them (`token_index`).
    Keys and values are all-gathered once per layer. Each chunk attends to its segment up to the chunk's end.
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
        self.cp_size = config.context_parallel_size  # 1 in the vision tower
        self.cp_group = pg_collection.cp if self.cp_size > 1 else None
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
        """Return attention [s, b, heads * d] of padded rows, or [tokens, heads * d] of a packed row.

        Args:
            query, key, value: [s, b, heads, d], or [tokens, heads, d] for a packed row.
            attention_mask, attention_bias: None. Masks are causal or full within segments.
            attn_mask_type: causal, or no mask in the vision tower.
            packed_seq_params: parameters of a packed row; None for padded rows.

        Raises:
            ValueError: a mask or a bias is given.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "attention_mask or attention_bias is set, expected None for both: pass a mask for padding to the "
                "model, which derives the sequence layout from it"
            )
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if packed_seq_params is None:
            rows = (x.permute(1, 2, 0, 3) for x in (query, *self._gather_ranks(key, value)))  # [b, heads, s, d]
            return self._attend(*rows, causal).permute(2, 0, 1, 3).flatten(2)
        lengths = physical_lengths(packed_seq_params, self.cp_size * len(query))
        has_layout = self.cp_size == 1 or getattr(packed_seq_params, "layout", None) is not None
        if has_layout and supports_varlen(query, key, value, self._dropout_rate()):
            return self._attend_packed(query, key, value, packed_seq_params, lengths, causal).flatten(1)
        key, value = self._gather_ranks(key, value)
        outputs, start = [], 0
        for length, segments in groupby(lengths):
            n, local_length = sum(1 for _ in segments), length // self.cp_size
            stop = start + n * local_length
            batch = (x[start:stop].view(n, local_length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            outputs.append(self._attend(*batch, causal).transpose(1, 2).flatten(0, 1))
            start = stop
        return torch.cat(outputs).flatten(1)

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams, lengths: tuple[int, ...], causal: bool
    ) -> Tensor:
        """Compute attention of a packed row [tokens, heads, d] in one call, without a host-device synchronization."""
        if self.cp_size == 1:
            offsets, longest = (physical_offsets(params),) * 2, (max(lengths),) * 2
        else:  # queries of a chunk are a segment; its keys end at the end of the chunk
            chunks = params.causal_chunks(self.cp_size, self.cp_group.rank())
            key_value = torch.cat((key, value), -1)
            gathered = gather_in_group(key_value, self.cp_group).flatten(0, 1)  # [cp * t, heads, 2 * d]
            # The gradient of this indexing sums at most two terms per token, so the order of summation does not matter.
            key, value = gathered.index_select(0, chunks.keys).chunk(2, -1)
            offsets, longest = chunks.offsets, chunks.longest
        window = (-1, 0) if causal else (-1, -1)  # a causal mask is aligned to the end of the keys
        # torch 2.11 accepts fewer key heads without the argument.
        heads = {"enable_gqa": query.size(1) != key.size(1)} if "enable_gqa" in _VARLEN else {}
        return varlen_attn(query, key, value, *offsets, *longest, scale=self.scale, window_size=window, **heads)

    def _gather_ranks(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Gather keys and values [..., heads, d] of all context-parallel ranks to [..., cp * heads, d].

        Segments have the same layout on every rank, so ranks are concatenated along the heads.
        """
        if self.cp_size == 1:
            return key, value
        gathered = gather_in_group(torch.cat((key, value), -1), self.cp_group)  # [cp, ..., heads, 2 * d]
        return gathered.movedim(0, -3).flatten(-3, -2).chunk(2, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Compute attention of queries [n, heads, s, d] to keys and values [n, cp * heads, s, d].

        Under context parallelism it is causal, because only the text model is context-parallel.
        """
        if self.cp_size == 1:
            return self._call_kernel(_sdpa, query, key, value, is_causal=causal)
        key, value = (self._order_chunks(x) for x in (key, value))
        c, rank = query.size(2) // 2, self.cp_group.rank()
        outputs = []
        for chunk, index in zip(query.split(c, 2), (rank, 2 * self.cp_size - 1 - rank), strict=True):
            end = (index + 1) * c
            outputs.append(self._call_kernel(attend_last_tokens, chunk, key[:, :, :end], value[:, :, :end]))
        return torch.cat(outputs, 2)

    def _order_chunks(self, x: Tensor) -> Tensor:
        """Put keys or values gathered from context-parallel ranks in the token order of each segment.

        Args:
            x: [n, cp * heads, 2 * c, d], two chunks of c tokens of each of n segments from each rank.

        Returns:
            [n, heads, 2 * cp * c, d].
        """
        # [n, cp, heads, c, d] each: rank r has chunk r, and chunk r from the end.
        first, second = x.unflatten(1, (self.cp_size, -1)).chunk(2, 3)
        return torch.cat((first, second.flip(1)), 1).transpose(1, 2).flatten(2, 3)

    def _call_kernel(self, kernel: Callable[..., Tensor], *tensors: Tensor, **arguments: Any) -> Tensor:
        dropout = self._dropout_rate()
        # Tensor-parallel ranks hold different heads and need different dropout masks.
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            return kernel(*tensors, scale=self.scale, dropout=dropout, **arguments)

    def _dropout_rate(self) -> float:
        return self.dropout if self.training else 0.0


def physical_offsets(params: PackedSeqParams) -> Tensor:
    """Return the cumulative physical (padded) lengths [n + 1] int32 of the n segments of a packed row."""
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded


def physical_lengths(params: PackedSeqParams, tokens: int) -> tuple[int, ...]:
    """Return the physical (padded) lengths of the segments of a packed row with `tokens` tokens.

    Synchronizes with the device only for parameters that another package has created.

    Raises:
        ValueError: the sum of the lengths is not `tokens`.
    """
    if isinstance(params, HostPackedSeqParams):
        lengths = params.lengths
    else:
        lengths = tuple(physical_offsets(params).diff().tolist())
    if sum(lengths) != tokens:
        raise ValueError(
            f"packed segments hold {sum(lengths)} tokens, the row has {tokens}: give packed_seq_params with the "
            "offsets of this row, including padding (cu_seqlens_q_padded)"
        )
    return lengths


def physical_layout(
    params: PackedSeqParams | None, rows: int, tokens: int, device: torch.device | str
) -> SequenceLayout:
    """Return the layout of the physical (padded) segments of a batch, for attention in which padding needs no mask.

    Synchronizes with the device only for parameters that another package has created.

    Args:
        params: parameters of a packed row; None for padded rows, each of which is a segment.
        rows: number of rows.
        tokens: number of tokens of a row on all context-parallel ranks.
        device: device of the layout of padded rows. It is created there without a copy from the host.
    """
    if params is None:
        offsets = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=device)
        return SequenceLayout(offsets, offsets, rows, (tokens,) * rows, (tokens,) * rows)
    if isinstance(params, HostPackedSeqParams) and params.layout is not None:
        return params.layout
    offsets, lengths = physical_offsets(params), physical_lengths(params, tokens)
    return SequenceLayout(offsets, offsets, 1, lengths, lengths)
