"""Core attention under context parallelism without Transformer Engine.

What lives here: how a rank's queries attend to the keys of all ranks. What may not: which tokens a rank holds
(`batch/token_layout.py`), which kernel computes attention (`kernels.py`).
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.common.attention.kernels import attend, attend_end, attend_row
from qwen3vl_bridge.models.common.attention.packed_rows import HostPackedSeqParams
from qwen3vl_bridge.models.common.attention.segments import SegmentAttention
from qwen3vl_bridge.parallel.collectives import gather_over_context

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ContextParallelAttention(SegmentAttention):
    """Core attention from a rank's local tokens to the tokens of all context-parallel ranks.

    Each segment is divided into 2 * cp chunks, and rank r holds chunks r and 2 * cp - 1 - r
    (`batch.token_layout.token_index`). Keys and values are all-gathered once per layer; each of the two chunks attends
    to all tokens up to its end.
    """

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: ProcessGroupCollection, **kwargs: Any):
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.group = pg_collection.cp

    def _takes_row(self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams, causal: bool) -> bool:
        known = isinstance(params, HostPackedSeqParams) and params.layout is not None
        return causal and known and super()._takes_row(query, key, value, params, causal)

    def _row(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: HostPackedSeqParams,
        lengths: tuple[int, ...],
        causal: bool,
    ) -> Tensor:
        """Like `SegmentAttention._row`; each chunk is a segment of queries whose keys end at the end of the chunk."""
        chunks = params.chunks(self.ranks, self.group.rank())
        gathered = gather_over_context(torch.cat((key, value), -1), self.group).flatten(0, 1)  # [cp t, heads, 2 d]
        # The gradient of this indexing sums at most two terms per token, so the order of summation does not matter.
        key, value = gathered.index_select(0, chunks.keys).chunk(2, -1)
        return attend_row(
            query, key, value, offsets=chunks.offsets, longest=chunks.longest, causal=causal, scale=self.scale
        )

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        return super()._rows(query, *self._slots(key, value), causal)

    def _by_segments(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
        return super()._by_segments(query, *self._slots(key, value), lengths, causal)

    def _slots(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """[..., heads, d] of this rank's slots -> [..., cp * heads, d] of all ranks' slots.

        Slots have the same segment layout on every rank, so the other ranks' slots are concatenated along the heads.
        """
        gathered = gather_over_context(torch.cat((key, value), -1), self.group)  # [cp, ..., heads, 2 d]
        return gathered.movedim(0, -3).flatten(-3, -2).chunk(2, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Attention of queries [n, heads, 2 c, d] to keys and values [n, cp * heads, 2 c, d]."""
        key, value = (self._in_order(x) for x in (key, value))
        if not causal:
            return self._call(attend, query, key, value, causal=False)
        chunk, rank = query.size(2) // 2, self.group.rank()
        attended = []
        for own, before in zip(query.split(chunk, 2), (rank, 2 * self.ranks - 1 - rank), strict=True):
            seen = (before + 1) * chunk
            attended.append(self._call(attend_end, own, key[:, :, :seen], value[:, :, :seen]))
        return torch.cat(attended, 2)

    def _in_order(self, x: Tensor) -> Tensor:
        """[n, cp * heads, 2 c, d] of all ranks' slots -> [n, heads, 2 cp c, d] in the order of the segment."""
        first, second = x.unflatten(1, (self.ranks, -1)).chunk(2, 3)  # [n, cp, heads, c, d]: chunk r, and its mirror
        return torch.cat((first, second.flip(1)), 1).transpose(1, 2).flatten(2, 3)
