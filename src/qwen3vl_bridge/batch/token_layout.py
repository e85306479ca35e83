"""Where the segments of a batch are, and which of its tokens one rank holds.

A padded row is a segment, and so is a packed document. A segment's real tokens come first, its padding after them.
Legend: B rows, S tokens a row, T = B * S, n segments, cp and sp the sizes of context and sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from qwen3vl_bridge.batch.device_transfer import Movable

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceLayout(Movable):
    """The segments of a batch. Create one with `rows`, `packed_row` or `of`.

    Lengths are on the host, so that reading them never waits for the device. Layouts are equal if lengths and rows are.

    Raises:
        ValueError: lengths that contradict each other.
    """

    cu_seqlens: Tensor = field(compare=False)  # [n + 1] int32, logical offsets: real tokens only
    # [n + 1] int32, physical offsets: where each segment starts in the flat batch.
    cu_seqlens_padded: Tensor = field(compare=False)
    num_rows: int  # B for padded rows, 1 for a packed row
    lengths: tuple[int, ...]  # the n logical lengths; 0 for a segment that consists only of padding
    padded_lengths: tuple[int, ...]  # the n physical lengths

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.padded_lengths):
            found = f"found {len(self.lengths)} lengths and {len(self.padded_lengths)} padded lengths"
            raise ValueError(f"a layout needs one padded length for each of its segments: {found}")
        for segment, (length, padded) in enumerate(zip(self.lengths, self.padded_lengths, strict=True)):
            if not 0 <= length <= padded or padded == 0:
                raise ValueError(f"segment {segment}: {length} tokens do not fit a padded length of {padded}")

    @classmethod
    def rows(cls, lengths: Sequence[int], seq_length: int) -> Self:
        """Padded rows: row i holds `lengths[i]` real tokens and is `seq_length` long."""
        return cls.of(len(lengths), lengths, [seq_length] * len(lengths))

    @classmethod
    def packed_row(cls, lengths: Sequence[int], *, multiple: int = 1, total: int | None = None) -> Self:
        """One row of consecutive segments of these real tokens, each padded to a `multiple`, see `segment_multiple`.

        The remainder to `total`, if given, becomes one more segment, of logical length 0: extending the last document
        with this padding would unbalance its context-parallel chunks.

        Raises:
            ValueError: the segments are longer than `total`, or the remainder is not a multiple of `multiple`.
        """
        padded = [-(-length // multiple) * multiple for length in lengths]
        rest = 0 if total is None else total - sum(padded)
        if rest < 0:
            problem = f"{len(padded)} segments take {sum(padded)} tokens, padded to multiples of {multiple}"
            raise ValueError(f"{problem}: expected at most {total}")
        if rest % multiple:
            problem = f"a row of {total} tokens has {rest} unused tokens after the last segment"
            raise ValueError(f"{problem}: expected a multiple of {multiple}")
        return cls.of(1, [*lengths, 0], [*padded, rest]) if rest else cls.of(1, lengths, padded)

    @classmethod
    def of(cls, num_rows: int, lengths: Sequence[int], padded_lengths: Sequence[int]) -> Self:
        """The layout of these lengths; its fields say what is possible."""
        return cls(
            cu_seqlens=offsets_of(lengths),
            cu_seqlens_padded=offsets_of(padded_lengths),
            num_rows=num_rows,
            lengths=tuple(lengths),
            padded_lengths=tuple(padded_lengths),
        )

    @property
    def total(self) -> int:
        """T, tokens of the whole batch with their padding."""
        return sum(self.padded_lengths)

    @property
    def packed(self) -> bool:
        """Whether the batch is a single row. A single padded row counts as a packed row with one document."""
        return self.num_rows == 1

    def padding_mask(self) -> Tensor:
        """[T] bool, True where there is no real token."""
        real, padded = self.cu_seqlens.diff(), self.cu_seqlens_padded.diff()
        turns = torch.arange(2 * len(real), device=real.device) % 2 == 1
        return turns.repeat_interleave(torch.stack((real, padded - real), -1).flatten(), output_size=self.total)

    def per_token(self, values: Tensor) -> Tensor:
        """[T], each segment's entry of `values` [n] at every token of the segment."""
        return values.repeat_interleave(self.cu_seqlens_padded.diff(), output_size=self.total)


def token_index(layout: SequenceLayout, cp_size: int, cp_rank: int, sp_size: int = 1, sp_rank: int = 0) -> Tensor:
    """Index into the flat batch for each position of a rank's hidden states: [T / B / cp_size / sp_size, B] int64.

    Each segment is cut into 2 * cp_size chunks and context-parallel rank r holds chunks r and 2 * cp_size - 1 - r of
    every segment, which balances causal attention. The rank's tokens are laid out as [s, b], and sequence-parallel rank
    q holds the q-th of sp_size equal parts of s. The result is on the layout's device.

    Raises:
        ValueError: a rank outside its group, a segment that does not divide into 2 * cp_size chunks, or rows that do
            not divide by sp_size.
    """
    _check_rank("context", cp_size, cp_rank)
    _check_rank("sequence", sp_size, sp_rank)
    row, start = layout.total // cp_size // layout.num_rows, layout.cu_seqlens_padded.long()
    flat = torch.arange(layout.total, device=start.device)
    if cp_size > 1:
        for segment, length in enumerate(layout.padded_lengths):
            if length % (2 * cp_size):
                raise ValueError(
                    f"segment {segment}: a padded length of {length} does not divide into the {2 * cp_size} chunks "
                    f"that context parallelism of {cp_size} needs"
                )
        chunk = start.diff() // (2 * cp_size)
        begins = torch.stack([start[:-1] + number * chunk for number in (cp_rank, 2 * cp_size - 1 - cp_rank)], 1)
        flat = _ranges(begins.flatten(), chunk.repeat_interleave(2), layout.total // cp_size)
    if row % sp_size:
        raise ValueError(
            f"{row} tokens a row on each context-parallel rank do not divide over {sp_size} sequence-parallel ranks"
        )
    return flat.view(layout.num_rows, row).T.chunk(sp_size)[sp_rank]


def next_index(layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """[T] int64 each token's next one in its segment (itself if there is none), [T] bool whether there is one."""
    own = torch.arange(layout.total, device=layout.cu_seqlens.device)
    ends = layout.per_token(layout.cu_seqlens_padded[:-1] + layout.cu_seqlens.diff())  # of real tokens
    has_next = own + 1 < ends
    return own + has_next, has_next


def segment_multiple(cp_size: int) -> int:
    """The multiple required of each segment's padded length: the number of chunks that `token_index` cuts it into.

    Sequence parallelism adds none: it splits a rank's part of a row regardless of segments, which attention gathers.
    """
    return 2 * cp_size if cp_size > 1 else 1


def gathered_index(layout: SequenceLayout, cp_size: int) -> Tensor:
    """The inverse of `token_index` over all context-parallel ranks.

    [T] int64, for each token of the flat batch its index in the ranks' parts, each flattened from [s, b], concatenated.

    Raises:
        ValueError: a segment that does not divide into 2 * cp_size chunks.
    """
    held = torch.cat([token_index(layout, cp_size, rank).T.flatten() for rank in range(cp_size)])
    return torch.empty_like(held).scatter_(0, held, torch.arange(len(held), device=held.device))


@dataclass(frozen=True)
class CausalChunks:
    """Queries and keys for a context-parallel rank's chunks of a packed row.

    Each segment has two chunks, which are consecutive in the rank's hidden states. The keys of a chunk are all tokens
    of its segment up to the chunk's end, so its queries are the last of its keys.
    """

    keys: Tensor  # [T (2 cp + 1) / (2 cp)] int64, indices of the keys in the parts of all ranks, see `gathered_index`
    offsets: tuple[Tensor, Tensor]  # [2 n + 1] int32 each, offsets of the chunks' queries, and of their keys
    longest: tuple[int, int]  # the maximum number of queries, and of keys, of a chunk


def causal_chunks(layout: SequenceLayout, cp_size: int, cp_rank: int) -> CausalChunks:
    """What a rank's tokens of a packed row attend to; computed on the layout's device, without waiting for it.

    Raises:
        ValueError: a rank outside its group, or a segment that does not divide into 2 * cp_size chunks.
    """
    _check_rank("context", cp_size, cp_rank)
    gathered = gathered_index(layout, cp_size)
    seen = cp_rank + 1, 2 * cp_size - cp_rank  # a segment's chunks up to the end of the rank's two
    chunk = layout.cu_seqlens_padded.diff() // (2 * cp_size)
    queries, keys = chunk.repeat_interleave(2), torch.stack([chunk * chunks for chunks in seen], 1).flatten()
    # In the segments' own order a chunk's keys begin where its segment does.
    begins, total = layout.cu_seqlens_padded[:-1].repeat_interleave(2), layout.total // (2 * cp_size) * sum(seen)
    offsets = [torch.nn.functional.pad(each.cumsum(0, dtype=torch.int32), (1, 0)) for each in (queries, keys)]
    longest = max(layout.padded_lengths) // (2 * cp_size)
    return CausalChunks(
        gathered[_ranges(begins, keys, total)], offsets=(offsets[0], offsets[1]), longest=(longest, longest * max(seen))
    )


def _ranges(begins: Tensor, lengths: Tensor, total: int) -> Tensor:
    """[total] int64, the indices from each of [n] begins on, as many as its length; `total` is the lengths' sum."""
    shift = begins - (lengths.cumsum(0) - lengths)
    return torch.arange(total, device=begins.device) + shift.repeat_interleave(lengths, output_size=total)


def _check_rank(kind: str, size: int, rank: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"{kind}-parallel rank {rank} is outside a group of {size}")


def offsets_of(lengths: Sequence[int]) -> Tensor:
    """[n + 1] int32, where each of n consecutive segments begins, and the end."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
