"""Packed-sequence parameters for attention.

What lives here: megatron-core's `PackedSeqParams`, extended by values known on the host. What may not: which tokens of
a row a rank holds (`batch/token_layout.py`), attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qwen3vl_bridge.batch.token_layout import CausalChunks, SequenceLayout, causal_chunks

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class HostPackedSeqParams(PackedSeqParams):
    """Packed-sequence parameters that also hold the physical (padded) segment lengths on the host.

    With `lengths`, attention that iterates over segments needs no host-device synchronization. `layout` gives attention
    under context parallelism the token distribution over ranks; it is None for the frames of the vision tower, which
    are not split.
    """

    lengths: tuple[int, ...] = ()
    layout: SequenceLayout | None = None
    _chunks: dict[tuple[int, int], CausalChunks] = field(default_factory=dict, init=False, repr=False, compare=False)

    def chunks(self, cp_size: int, cp_rank: int) -> CausalChunks:
        """`batch.token_layout.causal_chunks` of the layout, computed by the first layer and cached for all others."""
        if (cp_size, cp_rank) not in self._chunks:
            self._chunks[cp_size, cp_rank] = causal_chunks(self.layout, cp_size, cp_rank)
        return self._chunks[cp_size, cp_rank]


def packed_seq_params(
    cu_seqlens: Tensor, lengths: tuple[int, ...], layout: SequenceLayout | None = None
) -> HostPackedSeqParams:
    """Megatron's description of one packed row, with physical offsets only.

    Physical offsets are sufficient: attention is causal and padding is at the end of a segment, so no real token
    attends to padding, and the outputs of padding are excluded from losses and from experts' token counts. If logical
    lengths were also given, Transformer Engine would treat the difference as gaps between segments
    (`pad_between_seqs`), which FlashAttention does not support there, and which no backend supports on some devices and
    in float32. All four offsets are the same tensor, so that Transformer Engine has nothing to compare.

    Args:
        cu_seqlens: [n + 1] int32, cumulative physical segment lengths of the row.
        lengths: the n physical segment lengths of the row.
        layout: the corresponding layout, if the row may be split over context-parallel ranks.
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
    """Megatron's packed-sequence parameters for a layout: set for a packed row, None for padded rows."""
    return packed_seq_params(layout.cu_seqlens_padded, layout.padded_lengths, layout) if layout.packed else None
