"""QSA (sparse attention): each token attends to the blocks of tokens that the indexer selects, and to its own block.

On a GPU Triton kernels compute it (`sparse_kernels.py`). Elsewhere it is computed in chunks of queries with a mask for
each chunk. Both compute scores again in the backward pass, so memory grows with the number of tokens and not with its
square.

Legend of shapes: b rows, s tokens of a row on this context-parallel rank, t = b * s, T tokens of the batch, n queries
of a chunk, m keys of a chunk, d head dimension, k selected blocks. Keys and values may have fewer heads than queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from qwen3vl_bridge.core.collectives import gather_in_group
from qwen3vl_bridge.core.layout import (
    QueryChunk,
    SequenceLayout,
    inverse_token_index,
    query_chunks,
    token_index,
)
from qwen3vl_bridge.models.common.attention import attend_masked, layout_packed_seq_params, physical_layout
from qwen3vl_bridge.models.common.rope import RotarySelfAttention
from qwen3vl_bridge.models.qwen4_exp.indexer import QUERY_CHUNK, Indexer, TokenBlocks

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def attended_blocks(selection: Tensor, tokens: Tensor, blocks: TokenBlocks) -> Tensor:
    """Return the blocks that each query attends to, [n, 1 + k] int32; -1 stands for no block.

    The blocks are the query's own block, if it is incomplete, and the selected blocks. The arguments are those of
    `selected_tokens_mask`.
    """
    own = blocks.of_tokens[tokens]
    is_complete = tokens - blocks.offsets[own] == blocks.ratio - 1
    return torch.cat((own.masked_fill(is_complete, -1)[:, None].int(), selection), 1)


def selected_tokens_mask(selection: Tensor, tokens: Tensor, blocks: TokenBlocks, keys: slice) -> Tensor:
    """Return the mask [n, m] bool of the tokens that each query attends to.

    These are the tokens of its selected blocks and, if the query is not the last token of its block, the tokens of that
    block up to the query.

    Args:
        selection: [n, k] int32, result of `Indexer`.
        tokens: [n] int64, the token of each query.
        blocks: the blocks of the batch.
        keys: range of the m tokens.
    """
    columns, attended = blocks.range(keys), attended_blocks(selection, tokens, blocks)
    # Entries of -1 go to an additional column, which no token belongs to.
    column = (attended - columns.start).masked_fill(attended < 0, len(columns)).long()
    chosen = torch.zeros(len(tokens), len(columns) + 1, dtype=torch.bool, device=tokens.device)
    chosen.scatter_(1, column, True)
    is_visible = torch.arange(keys.start, keys.stop, device=tokens.device) <= tokens[:, None]
    return chosen.index_select(1, blocks.of_tokens[keys] - columns.start).logical_and_(is_visible)


class AttendSelectedTokens(torch.autograd.Function):
    """Attention of queries to selected tokens. Only its inputs are saved for the backward pass.

    The function computes each chunk again in the backward pass. Checkpoints of chunks would do the same, but allocate
    a gradient of all keys for every chunk, and add up these gradients in 16 bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        selection: Tensor,
        tokens: Tensor,
        blocks: TokenBlocks,
        chunks: Sequence[QueryChunk],
        scale: float,
    ) -> Tensor:
        """Return attention [t, heads, d].

        Args:
            ctx: keeps the inputs.
            query: [t, heads, d].
            key, value: [T, key heads, d].
            selection: [t, k] int32, result of `Indexer`.
            tokens: [t] int64, the token of each query.
            blocks: the blocks of the batch.
            chunks: see `core.layout.query_chunks`.
            scale: factor of the products of queries and keys.
        """
        ctx.save_for_backward(query, key, value, selection, tokens)
        ctx.settings = blocks, chunks, scale
        outputs = []
        for chunk in chunks:
            mask = selected_tokens_mask(selection[chunk.queries], tokens[chunk.queries], blocks, chunk.keys)
            outputs.append(_attend(query[chunk.queries], key[chunk.keys], value[chunk.keys], mask, scale))
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value. Those of keys and values are summed over chunks in float32."""
        query, key, value, selection, tokens = ctx.saved_tensors
        blocks, chunks, scale = ctx.settings
        query_gradients = []
        key_gradient, value_gradient = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        for chunk in chunks:
            mask = selected_tokens_mask(selection[chunk.queries], tokens[chunk.queries], blocks, chunk.keys)
            inputs = query[chunk.queries], key[chunk.keys], value[chunk.keys]
            inputs = [x.detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                output = _attend(*inputs, mask, scale)
            of_query, of_key, of_value = torch.autograd.grad(output, inputs, gradient[chunk.queries])
            query_gradients.append(of_query)
            key_gradient[chunk.keys] += of_key
            value_gradient[chunk.keys] += of_value
        gradients = torch.cat(query_gradients), key_gradient.to(key.dtype), value_gradient.to(value.dtype)
        return *gradients, None, None, None, None, None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return attention [n, heads, d] of queries [n, heads, d] to keys and values [m, key heads, d]."""
    batch = (x.transpose(0, 1)[None] for x in (query, key, value))
    return attend_masked(*batch, mask, scale=scale)[0].transpose(0, 1)


@functools.cache
def sparse_core_attention(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a core attention class that attends to selected blocks.

    Its argument `attention_mask` is the result of `Indexer`. If it is None, the base class computes attention.

    Args:
        base: `SegmentAttention`, or Megatron's class of Transformer Engine's attention.
    """

    class SparseCoreAttention(base):
        def __init__(
            self,
            config: TransformerConfig,
            layer_number: int,
            attn_mask_type: AttnMaskType,
            attention_type: str,
            *,
            attention_dropout: float | None = None,
            softmax_scale: float | None = None,
            pg_collection: ProcessGroupCollection,
            **arguments: Any,
        ) -> None:
            given = dict(attention_dropout=attention_dropout, softmax_scale=softmax_scale, pg_collection=pg_collection)
            super().__init__(config, layer_number, attn_mask_type, attention_type, **given, **arguments)
            # Attributes with names that Transformer Engine's class does not use.
            self.compress_ratio = config.indexer_compress_ratio
            self.budget = config.indexer_budget
            self.gather_group = group = pg_collection.cp if config.context_parallel_size > 1 else None
            self.cp_ranks, self.cp_rank = (1, 0) if group is None else (group.size(), group.rank())
            self.product_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
            sizes = config.kv_channels, config.indexer_compress_ratio
            self.has_kernels = config.kv_channels >= 16 and all(size & (size - 1) == 0 for size in sizes)
            self.dropout_rate = config.attention_dropout if attention_dropout is None else attention_dropout

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
            """Return attention [s, b, heads * d] of padded rows, or [t, heads * d] of a packed row.

            Args:
                query, key, value: [s, b, heads, d], or [t, heads, d] for a packed row.
                attention_mask: selected blocks [s, b, k] int32; None for attention to all visible tokens.
                attn_mask_type: causal.
                attention_bias: None.
                packed_seq_params: parameters of a packed row; None for padded rows.

            Raises:
                ValueError: selected blocks are given, and dropout is active or there is a bias.
            """
            if attention_mask is None:
                arguments = dict(attn_mask_type=attn_mask_type, attention_bias=attention_bias)
                return super().forward(query, key, value, None, packed_seq_params=packed_seq_params, **arguments)
            if (self.training and self.dropout_rate) or attention_bias is not None:
                raise ValueError(
                    f"attention to selected blocks has attention_dropout={self.dropout_rate} and "
                    f"attention_bias={attention_bias}, expected 0.0 and None"
                )
            is_packed = query.dim() == 3
            if is_packed:
                query, key, value = (x[:, None] for x in (query, key, value))
            length, rows = query.shape[:2]
            layout = physical_layout(packed_seq_params, rows, self.cp_ranks * length, query.device)
            query, key, value, selection = (
                x.transpose(0, 1).flatten(0, 1) for x in (query, key, value, attention_mask)
            )
            if is_packed and min(layout.padded_lengths) <= self.budget < max(layout.padded_lengths):
                return self.attend_by_length(query, key, value, selection, layout, attn_mask_type)
            output = self.attend_selected(query, key, value, selection, layout)
            return output if is_packed else output.view(rows, length, -1).transpose(0, 1).contiguous()

        def attend_by_length(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            selection: Tensor,
            layout: SequenceLayout,
            attn_mask_type: AttnMaskType,
        ) -> Tensor:
            """Attend to all visible tokens in segments up to `budget` tokens, to selected blocks in longer segments.

            A query in a short segment selects all blocks that it sees, so ordinary attention gives the same result. The
            base class computes many queries with the same keys at a time, which is faster.

            Args are those of `attend_selected`, for a packed row with segments of both kinds.
            """
            lengths = layout.cu_seqlens_padded.diff()
            is_long = lengths > self.budget
            # Computed on the device: a copy of indices from the host would synchronize.
            segments = is_long.argsort(stable=True)
            segment_of = layout.segment_ids()[token_index(layout, self.cp_ranks, self.cp_rank).T.flatten()]
            order = is_long[segment_of].argsort(stable=True)  # tokens of short segments first
            short_lengths = tuple(n for n in layout.padded_lengths if n <= self.budget)
            long_lengths = tuple(n for n in layout.padded_lengths if n > self.budget)
            of_short, of_long = segments.split([len(short_lengths), len(long_lengths)])
            short, long = order.split([sum(n) // self.cp_ranks for n in (short_lengths, long_lengths)])

            def packed_row(segments: Tensor, on_host: tuple[int, ...]) -> SequenceLayout:
                """Return the layout of a packed row of some segments, with their lengths on the host."""
                offsets = F.pad(lengths[segments].cumsum(0, dtype=torch.int32), (1, 0))
                return SequenceLayout(offsets, offsets, 1, on_host, on_host)

            parts = (x.index_select(0, short) for x in (query, key, value))
            params = layout_packed_seq_params(packed_row(of_short, short_lengths))
            short_output = super().forward(*parts, None, attn_mask_type=attn_mask_type, packed_seq_params=params)

            # In the row of long segments, blocks are numbered without those of earlier short segments.
            blocks = (lengths + self.compress_ratio - 1) // self.compress_ratio
            shift = blocks.masked_fill(is_long, 0).cumsum(0, dtype=torch.int32)[segment_of]
            selection = torch.where(selection < 0, selection, selection - shift[:, None])
            parts = (x.index_select(0, long) for x in (query, key, value, selection))
            long_output = self.attend_selected(*parts, packed_row(of_long, long_lengths))
            return torch.cat((short_output, long_output)).index_select(0, order.argsort())

        def attend_selected(
            self, query: Tensor, key: Tensor, value: Tensor, selection: Tensor, layout: SequenceLayout
        ) -> Tensor:
            """Return attention to selected blocks [t, heads * d].

            Args:
                query, key, value: [t, heads, d], row by row.
                selection: selected blocks [t, k] int32 of the layout.
                layout: segments of the batch.
            """
            key, value = self.gather_keys(key, value, layout)
            tokens = token_index(layout, self.cp_ranks, self.cp_rank).T.flatten()
            blocks = TokenBlocks(layout, self.compress_ratio)
            if query.is_cuda and self.has_kernels:
                from qwen3vl_bridge.models.qwen4_exp.sparse_kernels import AttendBlocks  # imports Triton

                attended = attended_blocks(selection, tokens, blocks)
                arguments = attended, tokens, blocks.offsets, blocks.ratio, self.product_scale
                return AttendBlocks.apply(query, key, value, *arguments).flatten(1)
            chunks = query_chunks(layout, QUERY_CHUNK, self.cp_ranks, self.cp_rank)
            arguments = selection, tokens, blocks, chunks, self.product_scale
            return AttendSelectedTokens.apply(query, key, value, *arguments).flatten(1)

        def gather_keys(self, key: Tensor, value: Tensor, layout: SequenceLayout) -> Sequence[Tensor]:
            """Return keys and values [T, heads, d] in the order of the batch, from [t, heads, d] of each rank."""
            if self.gather_group is None:
                return key, value
            gathered = gather_in_group(torch.cat((key, value), -1), self.gather_group).flatten(0, 1)
            return gathered.index_select(0, inverse_token_index(layout, self.cp_ranks)).chunk(2, -1)

    SparseCoreAttention.__name__ = SparseCoreAttention.__qualname__ = f"Sparse{base.__name__}"
    return SparseCoreAttention


class SparseSelfAttention(RotarySelfAttention):
    """Self attention to the blocks that the indexer selects. Core attention is a class from `sparse_core_attention`.

    If no segment is longer than `config.indexer_budget`, every block would be selected, and the indexer is not run.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.indexer = Indexer(config, self.pg_collection)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute self attention as in RotarySelfAttention. Core attention gets the selected blocks as its mask.

        Raises:
            ValueError: `attention_mask` is not None.
        """
        if attention_mask is not None:
            raise ValueError("attention_mask must be None: padding is described by the sequence layout")
        length, rows, _ = hidden_states.shape
        sp_size = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        tokens = length * sp_size * self.pg_collection.cp.size()
        layout = physical_layout(packed_seq_params, rows, tokens, hidden_states.device)
        selection = None
        if max(layout.padded_lengths) > self.config.indexer_budget:
            selection = self.indexer(hidden_states, rotary_pos_emb, layout)
        kwargs |= dict(rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params)
        return super().forward(hidden_states, selection, key_value_states, inference_context, **kwargs)
