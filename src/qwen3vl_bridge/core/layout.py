"""Describe where the segments of a batch are (`SequenceLayout`) and which tokens each rank holds (`token_index`).

No other module decides where tokens are. A padded row is a segment, and so is a document in a packed row. The real
tokens of a segment come first, its padding follows. All rows have the same length, so the whole batch is one flat
sequence of T tokens, in which segments follow each other:

    two padded rows, S = 4                      one packed row, each document padded to a multiple of 4
    [a a a .]   num_rows = 2                    [a a a . b b b b]   num_rows = 1
    [b b b b]   lengths = (3, 4)                                    lengths = (3, 4)
                padded_lengths = (4, 4)                             padded_lengths = (4, 4)

Labels, loss mask, positions and vision features of a rank are gathered from the flat batch by `token_index`, so that
model code has no branch for padded or packed rows, or for context and sequence parallelism.

Legend: B rows, S tokens per row, T = B * S, n segments, cp and sp the sizes of context and sequence parallelism.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Self

from qwen3vl_bridge.core.device_transfer import Transferable

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class SequenceLayout(Transferable):
    """The segments of a batch: padded rows, or documents in a packed row.

    Create a layout with `padded_rows`, `packed_row` or `from_lengths`. Lengths are on the host, so that reading them
    does not synchronize with the device.

    Raises:
        ValueError: no segments, or a segment longer than its padded length.
    """

    cu_seqlens: Tensor = field(compare=False)  # [n + 1] int32, logical offsets: real tokens only
    cu_seqlens_padded: Tensor = field(compare=False)  # [n + 1] int32, physical offsets in the flat batch
    num_rows: int  # B for padded rows, 1 for a packed row
    lengths: tuple[int, ...]  # the n logical lengths; 0 for a segment that consists only of padding
    padded_lengths: tuple[int, ...]  # the n physical lengths

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.padded_lengths):
            raise ValueError(
                f"found {len(self.lengths)} lengths and {len(self.padded_lengths)} padded lengths, expected at least "
                "one segment and the same number of both"
            )
        for segment, (length, padded) in enumerate(zip(self.lengths, self.padded_lengths, strict=True)):
            if not 0 <= length <= padded or padded == 0:
                raise ValueError(f"segment {segment}: {length} tokens do not fit a padded length of {padded}")

    @classmethod
    def padded_rows(cls, lengths: Sequence[int], seq_length: int) -> Self:
        """Return a layout of rows of `seq_length` tokens, where row i has `lengths[i]` real tokens."""
        return cls.from_lengths(len(lengths), lengths, [seq_length] * len(lengths))

    @classmethod
    def packed_row(cls, lengths: Sequence[int], *, multiple: int = 1, total: int | None = None) -> Self:
        """Return a layout of one row with consecutive segments.

        Args:
            lengths: the number of real tokens of each segment.
            multiple: pad each segment to a multiple of this number, see `segment_multiple`.
            total: the length of the row. The rest after the last segment becomes a segment without real tokens.

        Raises:
            ValueError: the segments are longer than `total`, or the rest is not a multiple of `multiple`.
        """
        padded = [-(-length // multiple) * multiple for length in lengths]
        rest = 0 if total is None else total - sum(padded)
        if rest < 0:
            raise ValueError(
                f"{len(padded)} segments, padded to multiples of {multiple}, have {sum(padded)} tokens: expected at "
                f"most {total} in a row"
            )
        if rest % multiple:
            raise ValueError(
                f"a row of {total} tokens has {rest} unused tokens after the last segment: expected a multiple of "
                f"{multiple}"
            )
        # Padding the last document with the rest instead would unbalance its context-parallel chunks.
        if rest:
            lengths, padded = [*lengths, 0], [*padded, rest]
        return cls.from_lengths(1, lengths, padded)

    @classmethod
    def from_lengths(cls, num_rows: int, lengths: Sequence[int], padded_lengths: Sequence[int]) -> Self:
        """Return a layout, given the number of real tokens of each segment, and the number including padding."""
        return cls(
            cu_seqlens=make_cu_seqlens(lengths),
            cu_seqlens_padded=make_cu_seqlens(padded_lengths),
            num_rows=num_rows,
            lengths=tuple(lengths),
            padded_lengths=tuple(padded_lengths),
        )

    @property
    def total(self) -> int:
        """Return the number of tokens of the batch, including padding."""
        return sum(self.padded_lengths)

    @property
    def packed(self) -> bool:
        """Return True if the batch is a single row. A single padded row is treated as a packed row of one document."""
        return self.num_rows == 1

    def segment_ids(self) -> Tensor:
        """Return the index of the segment of each token of the flat batch, int64."""
        return segment_ids(self.cu_seqlens_padded.diff(), self.total)

    def padding_mask(self) -> Tensor:
        """Return a bool mask over the tokens of the flat batch, True for padding."""
        real, padded = self.cu_seqlens.diff(), self.cu_seqlens_padded.diff()
        # Runs of real tokens and of padding take turns: odd runs are padding.
        return segment_ids(torch.stack((real, padded - real), -1).flatten(), self.total) % 2 == 1

    def place_tokens(self, segments: Sequence[Tensor], padding: float) -> Tensor:
        """Return [rows, tokens]: values of each segment's real tokens at their positions, and `padding` elsewhere."""
        values = torch.cat(list(segments))
        placed = values.new_full((self.total,), padding)
        placed[~self.padding_mask()] = values
        return placed.view(self.num_rows, -1)


def make_cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """Return [n + 1] int32 cumulative lengths: the start of each of n consecutive segments, and the end of the last."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


def segment_ids(lengths: Tensor, total: int | None = None) -> Tensor:
    """Return [total] int64, the index of each token's segment, for consecutive segments with these lengths [n].

    `total` is the sum of the lengths. If it is None and the lengths are on a GPU, the host waits for the sum.
    """
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=total)


def segment_offsets(lengths: Tensor, total: int | None = None) -> Tensor:
    """Return [total] int64, the index of each token within its segment, for consecutive segments with these lengths.

    `total` is the sum of the lengths. If it is None and the lengths are on a GPU, the host waits for the sum.
    """
    ids = segment_ids(lengths, total)
    return torch.arange(len(ids), device=ids.device) - (lengths.cumsum(0) - lengths)[ids]


def token_index(layout: SequenceLayout, cp_size: int, cp_rank: int, sp_size: int = 1, sp_rank: int = 0) -> Tensor:
    """Return the tokens of a rank as indices into the flat batch, [s, b] int64.

    Here b is the number of rows, and s the length of a row divided by cp_size * sp_size. Each segment is divided into
    2 * cp_size chunks. Context-parallel rank r holds chunks r and 2 * cp_size - 1 - r of every segment, which balances
    causal attention. Its tokens are divided along s into sp_size equal parts, one for each sequence-parallel rank.

    Raises:
        ValueError: a rank outside its group, a segment that is not divisible into 2 * cp_size chunks, or rows that are
            not divisible by sp_size.
    """
    _check_rank("context", cp_size, cp_rank)
    _check_rank("sequence", sp_size, sp_rank)
    row_length = layout.total // cp_size // layout.num_rows
    starts = layout.cu_seqlens_padded.long()
    flat = torch.arange(layout.total, device=starts.device)
    if cp_size > 1:
        for segment, length in enumerate(layout.padded_lengths):
            if length % (2 * cp_size):
                raise ValueError(
                    f"segment {segment} has a padded length of {length} tokens, expected a multiple of {2 * cp_size}, "
                    f"the number of chunks for {cp_size} context-parallel ranks: pad each segment to such a multiple"
                )
        chunk = starts.diff() // (2 * cp_size)
        begins = torch.stack([starts[:-1] + number * chunk for number in (cp_rank, 2 * cp_size - 1 - cp_rank)], 1)
        flat = _concatenate_ranges(begins.flatten(), chunk.repeat_interleave(2), layout.total // cp_size)
    if row_length % sp_size:
        raise ValueError(
            f"each context-parallel rank has {row_length} tokens per row, expected a multiple of the {sp_size} "
            f"sequence-parallel ranks: pad rows to a multiple of {cp_size * sp_size} tokens"
        )
    return flat.view(layout.num_rows, row_length).T.chunk(sp_size)[sp_rank]


def inverse_token_index(layout: SequenceLayout, cp_size: int) -> Tensor:
    """Return for each token of the flat batch its index in the concatenated tokens of all context-parallel ranks.

    The tokens of each rank (`token_index`) are flattened row by row, and concatenated in the order of ranks.

    Raises:
        ValueError: a segment that is not divisible into 2 * cp_size chunks.
    """
    held = torch.cat([token_index(layout, cp_size, rank).T.flatten() for rank in range(cp_size)])
    return torch.empty_like(held).scatter_(0, held, torch.arange(len(held), device=held.device))


def next_token_index(layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Return for each token of the flat batch the index of the next token, int64, and whether there is one, bool.

    Padding and the last real token of a segment have no next token. Their index is the index of the token itself.
    """
    index = torch.arange(layout.total, device=layout.cu_seqlens.device)
    ends_of_real_tokens = layout.cu_seqlens_padded[:-1] + layout.cu_seqlens.diff()
    has_next = index + 1 < ends_of_real_tokens[layout.segment_ids()]
    return index + has_next, has_next


def segment_multiple(cp_size: int) -> int:
    """Return the number that must divide the padded length of each segment under context parallelism."""
    return 2 * cp_size if cp_size > 1 else 1


@dataclass(frozen=True)
class CausalChunks:
    """The queries and keys of one context-parallel rank for causal attention in a packed row.

    The rank holds two chunks of each segment, which are consecutive in its hidden states. The queries of a chunk are
    its tokens. Its keys are all tokens of the segment up to the end of the chunk, so the last keys belong to the
    queries.
    """

    # [T (2 cp + 1) / (2 cp)] int64, indices of the keys in the concatenated tokens of all ranks.
    keys: Tensor
    offsets: tuple[Tensor, Tensor]  # [2 n + 1] int32 each, cumulative numbers of queries and of keys of the chunks
    longest: tuple[int, int]  # the largest number of queries, and of keys, of a chunk


def causal_chunks(layout: SequenceLayout, cp_size: int, cp_rank: int) -> CausalChunks:
    """Return the queries and keys of a context-parallel rank for a packed row, without a host-device synchronization.

    Raises:
        ValueError: a rank outside its group, or a segment that is not divisible into 2 * cp_size chunks.
    """
    _check_rank("context", cp_size, cp_rank)
    position = inverse_token_index(layout, cp_size)
    visible = cp_rank + 1, 2 * cp_size - cp_rank  # chunks of a segment up to the end of each of the rank's two
    chunk = layout.cu_seqlens_padded.diff() // (2 * cp_size)
    queries, keys = chunk.repeat_interleave(2), torch.stack([chunk * chunks for chunks in visible], 1).flatten()
    # In the flat batch, the keys of a chunk start where its segment does.
    begins, total = layout.cu_seqlens_padded[:-1].repeat_interleave(2), layout.total // (2 * cp_size) * sum(visible)
    query_offsets, key_offsets = (pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (queries, keys))
    longest = max(layout.padded_lengths) // (2 * cp_size)
    return CausalChunks(
        position[_concatenate_ranges(begins, keys, total)],
        offsets=(query_offsets, key_offsets),
        longest=(longest, longest * max(visible)),
    )


class QueryChunk(NamedTuple):
    """Consecutive tokens of a rank, and the range of tokens of the flat batch that they may attend to."""

    queries: slice  # positions among the rank's tokens, which are flattened row by row
    keys: slice  # from the start of the first query's segment to the last query


def query_chunks(
    layout: SequenceLayout, size: int, cp_size: int = 1, cp_rank: int = 0, sp_size: int = 1, sp_rank: int = 0
) -> list[QueryChunk]:
    """Divide the tokens of a rank (`token_index`) into chunks of at most `size` tokens, for causal attention.

    Bounds are computed on the host from the padded lengths. A chunk may contain tokens of several segments.

    Raises:
        ValueError: a rank outside its group.
    """
    _check_rank("context", cp_size, cp_rank)
    _check_rank("sequence", sp_size, sp_rank)
    starts = list(accumulate(layout.padded_lengths, initial=0))
    row_length = layout.total // cp_size // layout.num_rows
    local_length = row_length // sp_size

    def locate(query: int) -> tuple[int, int]:
        """Return two indices into the flat batch: the start of a query's segment, and the query's token."""
        row, column = divmod(query, local_length)
        position = row * row_length + sp_rank * local_length + column  # among tokens of the context-parallel rank
        segment = bisect_right(starts, position * cp_size) - 1
        start, length = starts[segment], layout.padded_lengths[segment]
        # The rank has chunks cp_rank and 2 * cp_size - 1 - cp_rank of the segment.
        offset, chunk = position - start // cp_size, length // (2 * cp_size)
        between = (2 * cp_size - 2 - 2 * cp_rank) * chunk if offset >= chunk else 0
        return start, start + cp_rank * chunk + between + offset

    chunks = []
    for first in range(0, layout.num_rows * local_length, size):
        stop = min(first + size, layout.num_rows * local_length)
        chunks.append(QueryChunk(slice(first, stop), slice(locate(first)[0], locate(stop - 1)[1] + 1)))
    return chunks


def locate_chunks(cu_seqlens: Tensor, num_chunks: int, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Return the segment of each chunk, and the index of the chunk in its segment: two tensors [num_chunks].

    Args:
        cu_seqlens: [n + 1], offsets of n segments.
        num_chunks: number of chunks, or an upper bound, which need not be read from the device. Chunks in excess
            continue the last segment.
        chunk_size: tokens in a chunk; the last chunk of a segment may have fewer.
    """
    ends = ((cu_seqlens.diff() + chunk_size - 1) // chunk_size).cumsum(0)
    chunk = torch.arange(num_chunks, device=cu_seqlens.device)
    segment = torch.searchsorted(ends, chunk, right=True).clamp(max=len(ends) - 1)
    return segment, chunk - pad(ends, (1, 0))[segment]


def _concatenate_ranges(begins: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Return [total] int64, the concatenated ranges [begin, begin + length); `total` is the sum of the lengths."""
    shift = begins - (lengths.cumsum(0) - lengths)
    return torch.arange(total, device=begins.device) + shift.repeat_interleave(lengths, output_size=total)


def _check_rank(kind: str, size: int, rank: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"{kind}-parallel rank {rank} is outside a group of {size}")
