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
        ValueError: lengths that contradict each other or the offsets.
    """

    cu_seqlens: Tensor = field(compare=False)  # [n + 1] int32, logical offsets: real tokens only
    # [n + 1] int32, physical offsets: where each segment starts in the flat batch.
    cu_seqlens_padded: Tensor = field(compare=False)
    num_rows: int  # B for padded rows, 1 for a packed row
    lengths: tuple[int, ...]  # the n logical lengths; 0 for a segment that consists only of padding
    padded_lengths: tuple[int, ...]  # the n physical lengths

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.padded_lengths):
            raise ValueError(
                f"a layout needs one padded length for each of its segments: found {len(self.lengths)} lengths "
                f"and {len(self.padded_lengths)} padded lengths"
            )
        for segment, (length, padded) in enumerate(zip(self.lengths, self.padded_lengths, strict=True)):
            if not 0 <= length <= padded or padded == 0:
                raise ValueError(f"segment {segment}: {length} tokens do not fit a padded length of {padded}")
        if self.num_rows != 1 and (self.num_rows != len(self.lengths) or len(set(self.padded_lengths)) != 1):
            raise ValueError(
                f"{self.num_rows} padded rows need {self.num_rows} segments of one padded length: "
                f"found {len(self.lengths)} segments of {_brief(sorted(set(self.padded_lengths)))}"
            )
        _check_offsets("cu_seqlens", self.cu_seqlens, self.lengths)
        _check_offsets("cu_seqlens_padded", self.cu_seqlens_padded, self.padded_lengths)

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
        if multiple < 1:
            raise ValueError(f"segments are padded to a multiple of at least 1: found {multiple}")
        padded = [-(-length // multiple) * multiple for length in lengths]
        rest = 0 if total is None else total - sum(padded)
        if rest < 0:
            raise ValueError(
                f"{len(padded)} segments take {sum(padded)} tokens, padded to multiples of {multiple}: "
                f"expected at most {total}"
            )
        if rest % multiple:
            raise ValueError(
                f"a row of {total} tokens has {rest} unused tokens after the last segment: expected a "
                f"multiple of {multiple}"
            )
        trailing = [rest] if rest else []
        return cls.of(1, [*lengths, *(0 for _ in trailing)], [*padded, *trailing])

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
    row = layout.total // cp_size // layout.num_rows
    flat = _zigzag(layout, cp_size, cp_rank)
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
    lengths = torch.stack([chunk * chunks for chunks in seen], 1).flatten()
    queries, keys = (_from_zero(each) for each in (chunk.repeat_interleave(2), lengths))
    # In the segments' own order a chunk's keys begin where its segment does.
    shift = layout.cu_seqlens_padded[:-1].repeat_interleave(2) - keys[:-1]
    total = layout.total // (2 * cp_size) * sum(seen)
    tokens = torch.arange(total, device=gathered.device) + shift.repeat_interleave(lengths, output_size=total)
    longest = max(layout.padded_lengths) // (2 * cp_size)
    return CausalChunks(keys=gathered[tokens], offsets=(queries, keys), longest=(longest, longest * max(seen)))


def _from_zero(lengths: Tensor) -> Tensor:
    """[n + 1] int32 offsets of [n] lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _zigzag(layout: SequenceLayout, cp_size: int, cp_rank: int) -> Tensor:
    """[T / cp_size] flat ids of the tokens in the two chunks of each segment that a rank holds."""
    device = layout.cu_seqlens_padded.device
    slot = torch.arange(layout.total // cp_size, device=device)
    if cp_size == 1:
        return slot
    for segment, length in enumerate(layout.padded_lengths):
        if length % (2 * cp_size):
            raise ValueError(
                f"segment {segment}: a padded length of {length} does not divide into the {2 * cp_size} chunks "
                f"that context parallelism of {cp_size} needs"
            )
    start = layout.cu_seqlens_padded.long()
    chunk = start.diff() // (2 * cp_size)
    # The rank's first chunk of a segment begins cp_rank chunks after the segment, its first slot two chunks after the
    # previous segment's; the second chunk skips those of the ranks in between, twice.
    shift = start[:-1] + cp_rank * chunk - start[:-1] // cp_size
    skip = 2 * (cp_size - 1 - cp_rank) * chunk
    second = start[:-1] // cp_size + chunk
    shift, skip, second = (
        values.repeat_interleave(2 * chunk, output_size=layout.total // cp_size) for values in (shift, skip, second)
    )
    return slot + shift + torch.where(slot >= second, skip, 0)


def _check_rank(kind: str, size: int, rank: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"{kind}-parallel rank {rank} is outside a group of {size}")


def _check_offsets(name: str, offsets: Tensor, lengths: tuple[int, ...]) -> None:
    if offsets.shape != (len(lengths) + 1,) or offsets.dtype != torch.int32:
        raise ValueError(
            f"{name}: found {list(offsets.shape)} {offsets.dtype}, expected [{len(lengths) + 1}] torch.int32"
        )
    # On another device a comparison would make the host wait.
    if offsets.device.type == "cpu" and not torch.equal(offsets, offsets_of(lengths)):
        raise ValueError(f"{name}: found {_brief(offsets.tolist())}, but the lengths are {_brief(lengths)}")


def offsets_of(lengths: Sequence[int]) -> Tensor:
    """[n + 1] int32, where each of n consecutive segments begins, and the end."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


def _brief(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"[{shown}, ...]" if len(numbers) > 8 else f"[{shown}]"
