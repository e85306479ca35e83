"""Attention: self attention that takes ready-made rotary angles, and a core attention without Transformer Engine.

What lives here: subclasses of megatron-core's attention seams. What may not: angles (`rope.py`), the choice of layer
specs (`layer_specs.py`).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from qwen3vl_bridge.batch.token_layout import SequenceLayout
from qwen3vl_bridge.models.common.rope import rotate
from qwen3vl_bridge.parallel.collectives import gather_over_context

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


@dataclass
class HostPackedSeqParams(PackedSeqParams):
    """Packed-sequence parameters that also know the physical segment lengths on the host.

    `lengths` spares an attention that works segment by segment from asking the device.
    """

    lengths: tuple[int, ...] = ()


def packed_seq_params(cu_seqlens: Tensor, lengths: tuple[int, ...]) -> HostPackedSeqParams:
    """Megatron's description of one packed row, by its offsets in the row alone.

    Attention needs no more: it is causal and a segment's padding comes last, so no real token attends to padding, and
    what padding gets is left out of losses and of experts' counts. Transformer Engine would take real lengths beside
    these offsets for gaps between segments (`pad_between_seqs`), for which it has no FlashAttention, and on some
    devices and in float32 nothing at all. All four offsets are one tensor, so that it has nothing to compare.

    Args:
        cu_seqlens: [n + 1] int32, where segments begin in the row, and the last one ends.
        lengths: the n segment lengths in the row.
    """
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
    )


def layout_packed_seq_params(layout: SequenceLayout) -> HostPackedSeqParams | None:
    """A layout as Megatron's attention wants it: parameters for a packed row, None for padded rows."""
    return packed_seq_params(layout.cu_seqlens_padded, layout.padded_lengths) if layout.packed else None


class RotarySelfAttention(SelfAttention):
    """Self attention whose rotary argument holds the angles of its own tokens, for padded and packed rows alike.

    Megatron rotates after it has dropped the row dimension of packed rows, and then looks positions up by segment and
    context-parallel rank. Our angles are local already, so queries and keys are rotated as they leave the projection.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As SelfAttention.forward; `rotary_pos_emb` is [2, s, b, 1, d] from `rope.cos_sin`."""
        # Self attention has no key_value_states; they carry the angles to get_query_key_value_tensors.
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb, inference_context, rotary_pos_emb=None, **kwargs
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Query, key and value [s, b, heads, d], the first two rotated by the angles in `key_value_states`."""
        query, key, *rest = super().get_query_key_value_tensors(hidden_states, None, **kwargs)
        if key_value_states is None:
            return query, key, *rest
        return rotate(query, key_value_states), rotate(key, key_value_states), *rest


class SegmentAttention(MegatronModule):
    """Core attention by torch's scaled_dot_product_attention: padded rows at once, packed rows by segment.

    Neighbouring segments of one length are attended as a batch, and no T x T mask is ever made. Padding at the end of
    a segment needs no mask either: attention is causal, or (vision) there is no padding.
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
            self.tp_group = pg_collection.tp  # that checkpoints ask for
        self.ranks = config.context_parallel_size  # that share each segment
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
            ValueError: a mask or a bias is given; this attention knows only causal and full segments.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "attention_mask and attention_bias must be None: padding is described by the sequence layout"
            )
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if packed_seq_params is None:
            attended = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), causal)
            return attended.permute(2, 0, 1, 3).flatten(2)
        runs, start = [], 0
        for whole, same in groupby(_segment_lengths(packed_seq_params, self.ranks * len(query))):
            n, length = sum(1 for _ in same), whole // self.ranks
            stop = start + n * length
            segments = (x[start:stop].view(n, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            runs.append(self._attend(*segments, causal).transpose(1, 2).flatten(0, 1))
            start = stop
        return torch.cat(runs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """[n, heads, length, d] each, keys and values possibly of fewer heads."""
        return self._product(query, key, value, is_causal=causal)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads, which drop different weights.
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            gqa = query.size(1) != key.size(1)
            return F.scaled_dot_product_attention(
                query, key, value, scale=self.scale, dropout_p=dropout, enable_gqa=gqa, **mask
            )


class ContextParallelAttention(SegmentAttention):
    """Core attention of a rank's own tokens to those of all context-parallel ranks.

    Of 2 * cp chunks of a segment, rank r has chunks r and 2 * cp - 1 - r (`batch.token_layout.token_index`). Keys and
    values are gathered once a layer; each of the two chunks attends to what lies before its end.
    """

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: ProcessGroupCollection, **kwargs: Any):
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As SegmentAttention.forward, of local tokens."""
        # What the other ranks hold in a slot rides along as more heads of it: slots are segments' on every rank.
        gathered = gather_over_context(torch.cat((key, value), -1), self.group)  # [cp, ..., heads, 2 d]
        key, value = gathered.movedim(0, -3).flatten(-3, -2).chunk(2, -1)
        return super().forward(query, key, value, *args, **kwargs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """[n, heads, 2 c, d] queries; keys and values [n, cp * heads, 2 c, d]."""
        key, value = (self._in_order(x) for x in (key, value))
        if not causal:
            return self._product(query, key, value)
        chunk, rank = query.size(2) // 2, self.group.rank()
        attended = []
        for own, before in zip(query.split(chunk, 2), (rank, 2 * self.ranks - 1 - rank), strict=True):
            seen = (before + 1) * chunk
            mask = causal_lower_right(chunk, seen)
            attended.append(self._product(own, key[:, :, :seen], value[:, :, :seen], attn_mask=mask))
        return torch.cat(attended, 2)

    def _in_order(self, x: Tensor) -> Tensor:
        """[n, cp * heads, 2 c, d] of all ranks' slots -> [n, heads, 2 cp c, d] in the order of the segment."""
        first, second = x.unflatten(1, (self.ranks, -1)).chunk(2, 3)  # [n, cp, heads, c, d]: chunk r, and its mirror
        return torch.cat((first, second.flip(1)), 1).transpose(1, 2).flatten(2, 3)


def _segment_lengths(params: PackedSeqParams, tokens: int) -> tuple[int, ...]:
    """Physical segment lengths of a packed row; asks the device only for parameters that others made."""
    if isinstance(params, HostPackedSeqParams):
        lengths = params.lengths
    else:
        offsets = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        lengths = tuple(offsets.diff().tolist())
    if sum(lengths) != tokens:
        raise ValueError(f"packed segments hold {sum(lengths)} tokens, the row has {tokens}")
    return lengths
