"""The indexer of QSA: it selects the blocks of tokens that each token attends to.

The tokens of a segment are divided into blocks of `compress_ratio` tokens, from the segment's first token. A query
attends to its `budget // compress_ratio` complete blocks with the highest scores, and always to the incomplete block
that it is in. Tokens after the query are not visible to it, so a block is complete if the query has reached its end.

Legend of shapes: b rows, s tokens of a row on this context-parallel rank, sp sequence-parallel ranks, T tokens of the
batch, n queries of a chunk, r rotated dimensions, d index head dimension, k selected blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

from qwen3vl_bridge.core.collectives import gather_stacked
from qwen3vl_bridge.core.layout import (
    SequenceLayout,
    inverse_token_index,
    query_chunks,
    segment_ids,
    segment_offsets,
    token_index,
)
from qwen3vl_bridge.models.common.layer_specs import ZeroCenteredRMSNorm
from qwen3vl_bridge.models.common.rope import rotate_heads

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

QUERY_CHUNK = 512  # queries; memory for scores and masks is at most this number times the visible tokens


class TokenBlocks:
    """Division of a batch into blocks of consecutive tokens, numbered across segments.

    The last block of a segment may be shorter.

    Args:
        layout: segments of the batch; no block crosses their ends.
        ratio: number of tokens of a block.

    Attributes:
        offsets: [blocks + 1] int64, the first token of each block in the flat batch, and the number of tokens.
        of_tokens: [T] int64, the block of each token.
    """

    def __init__(self, layout: SequenceLayout, ratio: int) -> None:
        counts = [-(-length // ratio) for length in layout.padded_lengths]
        self.ratio = ratio
        self._segments = list(accumulate(layout.padded_lengths, initial=0))
        self._blocks = list(accumulate(counts, initial=0))
        starts = layout.cu_seqlens_padded.long()
        on_device, blocks = (starts.diff() + ratio - 1) // ratio, self._blocks[-1]
        first = starts[segment_ids(on_device, blocks)] + ratio * segment_offsets(on_device, blocks)
        self.offsets = torch.cat((first, starts[-1:]))
        self.of_tokens = segment_ids(self.offsets.diff(), layout.total)

    def range(self, tokens: slice) -> range:
        """Return the blocks that contain a range of tokens. Computed on the host."""
        return range(self._block(tokens.start), self._block(tokens.stop - 1) + 1)

    def _block(self, token: int) -> int:
        segment = bisect_right(self._segments, token) - 1
        return self._blocks[segment] + (token - self._segments[segment]) // self.ratio


class Indexer(MegatronModule):
    """Select the blocks of tokens that each token attends to. Source: transformers, Qwen4ExpTextQSAIndexer.

    The score of a block is sum over heads of relu(query . key) / sqrt(d), in float32. The key of a block is the mean of
    its tokens' keys, normalized, and rotated as its first token. Of blocks with equal scores any may be selected; the
    relu makes scores of 0 frequent if there are few heads.

    The selection passes no gradient, so the parameters are frozen. They are replicated on all tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp  # read by `sharded_state_dict`
        self.heads, self.dim = config.indexer_n_heads, config.indexer_head_dim
        width = (self.heads + 1) * self.dim
        self.index_qk_proj = nn.Linear(config.hidden_size, width, bias=False, dtype=config.params_dtype)
        self.q_layernorm = ZeroCenteredRMSNorm(config, self.dim, eps=config.layernorm_epsilon)
        self.k_layernorm = ZeroCenteredRMSNorm(config, self.dim, eps=config.layernorm_epsilon)
        if config.perform_initialization:
            config.init_method(self.index_qk_proj.weight)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, rotary: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the selected blocks [s, b, k] int32 of each token of this context-parallel rank.

        Blocks are numbered over the whole batch (`TokenBlocks`). If a token sees fewer than k complete blocks, its last
        entries are -1. There is no host-device synchronization.

        Args:
            hidden: [s / sp, b, h], the input of attention on this rank.
            rotary: result of `models.common.rope.rotation` for the s tokens of each row.
            layout: see `models.common.attention.physical_layout`.
        """
        cp, tp = self.pg_collection.cp, self.pg_collection.tp
        sp_size, sp_rank = (tp.size(), tp.rank()) if self.config.sequence_parallel else (1, 0)
        local_length, rows, _ = hidden.shape
        # Cosines and sines [2, s, b, r], or angles [1, s, b, r].
        parts = rotary.reshape(-1, sp_size * local_length, rows, rotary.size(-1))

        queries, raw_keys = self.index_qk_proj(hidden).split([self.heads * self.dim, self.dim], -1)
        own = parts.chunk(sp_size, 1)[sp_rank]
        queries = rotate_heads(self.q_layernorm(queries.unflatten(-1, (self.heads, self.dim))), _like(rotary, own))

        blocks = TokenBlocks(layout, self.config.indexer_compress_ratio)
        if sp_size > 1:
            raw_keys = gather_stacked(raw_keys, tp).flatten(0, 1)
        keys = self._block_keys(raw_keys, parts, rotary, layout, blocks)

        tokens = token_index(layout, cp.size(), cp.rank(), sp_size, sp_rank).T.flatten()
        segment_starts = layout.cu_seqlens_padded.long()[layout.segment_ids()][tokens]
        queries = queries.transpose(0, 1).flatten(0, 1)  # [b * s / sp, heads, d], row by row like `tokens`
        selected = [
            self._select(
                queries[chunk.queries], keys, tokens[chunk.queries], segment_starts[chunk.queries], blocks, chunk.keys
            )
            for chunk in query_chunks(layout, QUERY_CHUNK, cp.size(), cp.rank(), sp_size, sp_rank)
        ]
        selection = torch.cat(selected).view(rows, local_length, -1).transpose(0, 1)
        return gather_stacked(selection, tp).flatten(0, 1) if sp_size > 1 else selection

    def _block_keys(
        self, raw_keys: Tensor, parts: Tensor, rotary: Tensor, layout: SequenceLayout, blocks: TokenBlocks
    ) -> Tensor:
        """Return the key of each block [blocks, d], for raw keys [s, b, d] and rotations [1 or 2, s, b, r] of a rank.

        Keys of incomplete blocks have arbitrary values.
        """
        order = inverse_token_index(layout, self.pg_collection.cp.size())

        def in_order(x: Tensor) -> Tensor:
            """Gather x [s, b, ...] of all context-parallel ranks to [T, ...]."""
            flat = x.transpose(0, 1).flatten(0, 1)
            return gather_stacked(flat, self.pg_collection.cp).flatten(0, 1).index_select(0, order)

        first = blocks.offsets[:-1]
        members = first[:, None] + torch.arange(blocks.ratio, device=first.device)
        pooled = in_order(raw_keys)[members.clamp(max=layout.total - 1)].float().mean(1).to(raw_keys.dtype)
        rotation = in_order(parts.movedim(0, 2)).index_select(0, first).transpose(0, 1)  # [1 or 2, blocks, r]
        return rotate_heads(self.k_layernorm(pooled)[:, None, None], _like(rotary, rotation[:, :, None])).flatten(1)

    def _select(
        self, queries: Tensor, keys: Tensor, tokens: Tensor, segment_starts: Tensor, blocks: TokenBlocks, visible: slice
    ) -> Tensor:
        """Return the selected blocks [n, k] int32 of a chunk of queries.

        Args:
            queries: [n, heads, d].
            keys: [blocks, d].
            tokens, segment_starts: [n], the token of each query, and the first token of its segment.
            blocks: the blocks of the batch.
            visible: range of tokens that the chunk sees.
        """
        candidates = blocks.range(visible)
        in_range = slice(candidates.start, candidates.stop)
        products = torch.matmul(queries.float(), keys[in_range].float().T)  # [n, heads, candidates]
        scores = products.relu_().sum(1) / math.sqrt(self.dim)
        first = blocks.offsets[in_range]
        is_complete = (first >= segment_starts[:, None]) & (first + blocks.ratio <= tokens[:, None] + 1)
        scores.masked_fill_(~is_complete, -torch.inf)
        k = self.config.indexer_budget // blocks.ratio
        # Sorted, so that entries of -1 are last. Kernels stop at the last block.
        best = scores.topk(min(k, len(candidates)))
        selected = (best.indices + candidates.start).masked_fill(best.values == -torch.inf, -1)
        return F.pad(selected, (0, k - selected.size(1)), value=-1).int()


def _like(rotary: Tensor, parts: Tensor) -> Tensor:
    """Reshape rotations [1 or 2, s, b, r] for `rotate_heads`, for the same kernel as `rotary`.

    The result is [s * b, 1, 1, r] if `rotary` contains angles for Transformer Engine's kernel, and [2, s, b, 1, r] if
    it contains cosines and sines.
    """
    is_fused = rotary.dim() == 4
    return parts.reshape(-1, 1, 1, parts.size(-1)) if is_fused else parts[:, :, :, None]
