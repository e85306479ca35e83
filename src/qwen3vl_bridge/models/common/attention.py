"""Attention: self attention that takes ready-made rotary angles, and what attention is told of packed rows.

What lives here: a subclass of megatron-core's self attention, and its description of packed rows. What may not: angles
(`rope.py`), attention without Transformer Engine (`core_attention/`), the choice of layer specs (`layer_specs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qwen3vl_bridge.batch.token_layout import CausalChunks, SequenceLayout, causal_chunks
from qwen3vl_bridge.models.common.rope import rotate

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


@dataclass
class HostPackedSeqParams(PackedSeqParams):
    """Packed-sequence parameters that also know the physical segment lengths on the host.

    `lengths` spares an attention that works segment by segment from asking the device, and `layout` tells one that is
    shared by context-parallel ranks where their tokens lie; frames of the vision tower, which are not, have none.
    """

    lengths: tuple[int, ...] = ()
    layout: SequenceLayout | None = None
    _chunks: dict[tuple[int, int], CausalChunks] = field(default_factory=dict, init=False, repr=False, compare=False)

    def chunks(self, cp_size: int, cp_rank: int) -> CausalChunks:
        """`batch.token_layout.causal_chunks` of the layout, the same for all layers, so that the first works it out."""
        if (cp_size, cp_rank) not in self._chunks:
            self._chunks[cp_size, cp_rank] = causal_chunks(self.layout, cp_size, cp_rank)
        return self._chunks[cp_size, cp_rank]


def packed_seq_params(
    cu_seqlens: Tensor, lengths: tuple[int, ...], layout: SequenceLayout | None = None
) -> HostPackedSeqParams:
    """Megatron's description of one packed row, by its offsets in the row alone.

    Attention needs no more: it is causal and a segment's padding comes last, so no real token attends to padding, and
    what padding gets is left out of losses and of experts' counts. Transformer Engine would take real lengths beside
    these offsets for gaps between segments (`pad_between_seqs`), for which it has no FlashAttention, and on some
    devices and in float32 nothing at all. All four offsets are one tensor, so that it has nothing to compare.

    Args:
        cu_seqlens: [n + 1] int32, where segments begin in the row, and the last one ends.
        lengths: the n segment lengths in the row.
        layout: the same as a layout, where context-parallel ranks may share the row.
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
        layout=layout,
    )


def layout_packed_seq_params(layout: SequenceLayout) -> HostPackedSeqParams | None:
    """A layout as Megatron's attention wants it: parameters for a packed row, None for padded rows."""
    return packed_seq_params(layout.cu_seqlens_padded, layout.padded_lengths, layout) if layout.packed else None


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
