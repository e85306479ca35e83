"""Contents of a target tensor: ranges of source tensors, transposed matrices of them, and zeros."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple


class Slice(NamedTuple):
    """Consecutive elements of a source tensor, in row-major order; `plus` is added to each."""

    source: str
    start: int
    length: int
    plus: int = 0

    def part(self, start: int, length: int) -> Slice:
        """Some of its elements, as a segment."""
        return Slice(self.source, self.start + start, length, self.plus)


class TransposedSlice(NamedTuple):
    """Elements [start, start + length) of a transposed matrix.

    The matrix has `columns` columns, and its elements are those of `slices`, one slice after the other.
    """

    slices: tuple[Slice, ...]
    columns: int
    start: int
    length: int

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return sum(one.length for one in self.slices)

    @property
    def rows(self) -> int:
        """Rows of the matrix: columns of the transposed one."""
        return self.numel // self.columns

    def part(self, start: int, length: int) -> TransposedSlice:
        """Some of its elements, as a segment."""
        return self._replace(start=self.start + start, length=length)


class Zeros(NamedTuple):
    """Elements without a source, such as rows that pad a vocabulary."""

    length: int

    def part(self, start: int, length: int) -> Zeros:
        """Some of its elements, as a segment."""
        del start
        return Zeros(length)


Segment = Slice | TransposedSlice | Zeros


class Segments:
    """Consecutive segments, which can be cut anywhere at little cost."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._pieces = tuple(segments)

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((segment.length for segment in self._pieces), initial=0))

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def length(self) -> int:
        """Number of elements."""
        return self._starts[-1]

    def cut(self, start: int, length: int) -> Iterator[Segment]:
        """Elements [start, start + length) as segments.

        Raises:
            AssertionError: there are fewer.
        """
        end = start + length
        if end > self.length:
            raise AssertionError(f"elements up to {end} of {self.length}")
        at = bisect_right(self._starts, start) - 1
        while start < end:
            segment, first = self._pieces[at], self._starts[at]
            take = min(end, first + segment.length) - start
            if take:
                yield segment if take == segment.length else segment.part(start - first, take)
            start, at = start + take, at + 1


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same elements in fewer segments: adjacent slices of a tensor as one."""
    last: Segment | None = None
    for segment in segments:
        if (
            isinstance(last, Slice)
            and isinstance(segment, Slice)
            and (last.source, last.start + last.length, last.plus) == (segment.source, segment.start, segment.plus)
        ):
            last = last._replace(length=last.length + segment.length)
            continue
        if last is not None:
            yield last
        last = segment
    if last is not None:
        yield last
