"""What a target tensor is made of: stretches of source tensors, transposed matrices of them, and zeros.

What lives here: the three kinds of piece, and a row of them that can be cut anywhere. What may not: names, files,
torch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive elements of a source tensor, in row-major order."""

    source: str
    start: int
    length: int

    def part(self, start: int, length: int) -> Run:
        """Some of its elements."""
        return Run(self.source, self.start + start, length)


class Transposed(NamedTuple):
    """Elements [start, start + length) of a transposed matrix.

    The matrix has `columns` columns, and its elements are those of `runs`, one run after the other.
    """

    runs: tuple[Run, ...]
    columns: int
    start: int
    length: int

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return sum(run.length for run in self.runs)

    @property
    def rows(self) -> int:
        """Rows of the matrix: columns of what it is turned into."""
        return self.numel // self.columns

    def part(self, start: int, length: int) -> Transposed:
        """Some of its elements."""
        return self._replace(start=self.start + start, length=length)


class Zeros(NamedTuple):
    """Elements that no source has, such as rows that pad a vocabulary."""

    length: int

    def part(self, start: int, length: int) -> Zeros:
        """Some of its elements."""
        del start
        return Zeros(length)


Piece = Run | Transposed | Zeros


class Pieces:
    """Pieces one after the other, to be cut anywhere at little cost."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = tuple(pieces)

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((piece.length for piece in self._pieces), initial=0))

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def length(self) -> int:
        """Number of elements."""
        return self._starts[-1]

    def cut(self, start: int, length: int) -> Iterator[Piece]:
        """Elements [start, start + length) as pieces.

        Raises:
            AssertionError: there are fewer.
        """
        end = start + length
        if end > self.length:
            raise AssertionError(f"elements up to {end} of {self.length}")
        at = bisect_right(self._starts, start) - 1
        while start < end:
            piece, first = self._pieces[at], self._starts[at]
            take = min(end, first + piece.length) - start
            if take:
                yield piece if take == piece.length else piece.part(start - first, take)
            start, at = start + take, at + 1


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same elements in fewer pieces: neighbouring runs of a tensor as one."""
    last: Piece | None = None
    for piece in pieces:
        if (
            isinstance(last, Run)
            and isinstance(piece, Run)
            and (last.source, last.start + last.length) == (piece.source, piece.start)
        ):
            last = Run(last.source, last.start, last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
