"""What attention is told of packed rows.

What lives here: megatron-core's description of them, with what the host knows besides. What may not: which tokens of a
row a rank holds (`batch/token_layout.py`), attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qwen3vl_bridge.batch.token_layout import CausalChunks, SequenceLayout, causal_chunks

from megatron.core.packed_seq_params import PackedSeqParams
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
