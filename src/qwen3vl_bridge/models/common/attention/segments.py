"""Core attention without Transformer Engine: causal or full attention within segments.

What lives here: the replacement of megatron-core's core attention module. What may not: the kernel selection
(`kernels.py`), tokens of other ranks (`context_parallel.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

from qwen3vl_bridge.models.common.attention.kernels import attend, attend_row, varlen_takes
from qwen3vl_bridge.models.common.attention.packed_rows import HostPackedSeqParams

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SegmentAttention(MegatronModule):
    """Core attention that processes padded rows as one batch, and packed rows in one call or segment by segment.

    FlashAttention supports packed rows directly. Where it is not available, adjacent segments of equal length are
    batched. No T x T mask is created, and padding at the end of a segment needs no mask, because attention is causal or
    (vision) there is no padding.
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
        self.ranks = config.context_parallel_size  # context-parallel size
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
        """Attention of [s, b, heads, d] rows, or of a [t, heads, d] packed row.

        Returns:
            [s, b, heads * d] or [t, heads * d].

        Raises:
            ValueError: a mask or a bias is given; this module supports only causal and full attention within segments.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "attention_mask and attention_bias must be None: padding is described by the sequence layout"
            )
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if packed_seq_params is None:
            return self._rows(query, key, value, causal).flatten(2)
        lengths = segment_lengths(packed_seq_params, self.ranks * len(query))
        if self._takes_row(query, key, value, packed_seq_params, causal):
            return self._row(query, key, value, packed_seq_params, lengths, causal).flatten(1)
        return self._by_segments(query, key, value, lengths, causal).flatten(1)

    def _takes_row(self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams, causal: bool) -> bool:
        """Whether a packed row is computed in one varlen call."""
        return varlen_takes(query, key, value, self._rate())

    def _row(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: PackedSeqParams,
        lengths: tuple[int, ...],
        causal: bool,
    ) -> Tensor:
        """Attention of a packed row [t, heads, d] in one call."""
        offsets, longest = physical_offsets(params), max(lengths)
        return attend_row(
            query,
            key,
            value,
            offsets=(offsets, offsets),
            longest=(longest, longest),
            causal=causal,
            scale=self.scale,
        )

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Attention of padded rows [s, b, heads, d]."""
        attended = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), causal)
        return attended.permute(2, 0, 1, 3)

    def _by_segments(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
        """Attention of a packed row [t, heads, d], one batch of adjacent segments of equal length at a time."""
        runs, start = [], 0
        for whole, same in groupby(lengths):
            n, length = sum(1 for _ in same), whole // self.ranks
            stop = start + n * length
            segments = (x[start:stop].view(n, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            runs.append(self._attend(*segments, causal).transpose(1, 2).flatten(0, 1))
            start = stop
        return torch.cat(runs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Attention of [n, heads, length, d] tensors; keys and values may have fewer heads."""
        return self._call(attend, query, key, value, causal=causal)

    def _call(self, kernel: Callable[..., Tensor], *tensors: Tensor, **arguments: Any) -> Tensor:
        dropout = self._rate()
        # Tensor-parallel ranks hold different heads and need different dropout masks.
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            return kernel(*tensors, scale=self.scale, dropout=dropout, **arguments)

    def _rate(self) -> float:
        """The dropout rate in the current mode."""
        return self.dropout if self.training else 0.0


def physical_offsets(params: PackedSeqParams) -> Tensor:
    """[n + 1] int32, cumulative physical segment lengths of a packed row."""
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded


def segment_lengths(params: PackedSeqParams, tokens: int) -> tuple[int, ...]:
    """Physical segment lengths of a packed row; synchronizes with the device only for parameters created elsewhere."""
    if isinstance(params, HostPackedSeqParams):
        lengths = params.lengths
    else:
        lengths = tuple(physical_offsets(params).diff().tolist())
    if sum(lengths) != tokens:
        raise ValueError(f"packed segments hold {sum(lengths)} tokens, the row has {tokens}")
    return lengths
