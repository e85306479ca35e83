"""Files planned byte by byte, before the first byte is written.

Because everything is laid out beforehand, a result does not depend on the number of processes that write it, or on
interruptions.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.formats.slices import Segments
from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE, TensorSpec

# A unit is what one process writes at a time, and what a resumed run need not write again. It is a multiple of any page
# size, so that two machines never write to the same page of a shared file.
UNIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """One target tensor.

    Attributes:
        target: its description.
        segments: its elements, in order; cast to its dtype if theirs differs.
        leading: number of its leading dimensions that count layers or experts.
    """

    target: TensorSpec
    segments: Segments
    leading: int = 0


@dataclass(frozen=True, slots=True)
class Data:
    """Elements of a tensor: `segments` cut to [start, start + length), in `dtype`."""

    segments: Segments
    dtype: str
    start: int
    length: int

    def __len__(self) -> int:
        return self.length * ITEMSIZE[self.dtype]


Content = bytes | Data


@dataclass
class OutputFile:
    """A planned file.

    Attributes:
        name: relative to the result's folder.
        divisible: whether several processes may write parts of it.
        contents: its contents, in order.
        nbytes: number of their bytes.
    """

    name: str
    divisible: bool = True
    contents: list[Content] = field(default_factory=list)
    nbytes: int = 0

    def append(self, content: Content) -> None:
        """Add a content at the end."""
        self.contents.append(content)
        self.nbytes += len(content)

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.contents), initial=0))

    def contents_of(self, unit: Unit) -> Iterator[Content]:
        """Contents of a unit, cut at its beginning and end."""
        at = bisect_right(self._starts, unit.start) - 1
        position = unit.start
        while position < unit.end:
            content, first = self.contents[at], self._starts[at]
            take = min(unit.end, first + len(content)) - position
            if take:
                yield content if take == len(content) else _cut(content, position - first, take)
            position, at = position + take, at + 1


class Unit(NamedTuple):
    """Bytes [start, end) of the file number `file`."""

    file: int
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.end - self.start


def _cut(content: Content, start: int, nbytes: int) -> Content:
    if isinstance(content, bytes):
        return content[start : start + nbytes]
    size = ITEMSIZE[content.dtype]
    if start % size or nbytes % size:
        raise AssertionError(f"a cut at byte {start} of a content with elements of {size}")
    return Data(content.segments, content.dtype, content.start + start // size, nbytes // size)


def units(files: Sequence[OutputFile]) -> list[Unit]:
    """All bytes of some files, in units of `UNIT_BYTES`; the last unit of a file may be shorter."""
    return [
        Unit(number, start, min(start + step, file.nbytes))
        for number, file in enumerate(files)
        for step in [UNIT_BYTES if file.divisible else max(file.nbytes, 1)]
        for start in range(0, file.nbytes, step)
    ]


def share[Item](work: Sequence[Item], sizes: Sequence[int], rank: int, size: int) -> list[Item]:
    """The part of one of several processes: neighbouring units with about the same number of bytes for each.

    Args:
        work: all units.
        sizes: bytes of each.
        rank: index of the process.
        size: number of processes.
    """
    total, ends = max(sum(sizes), 1), itertools.accumulate(sizes)
    middles = (end - nbytes / 2 for end, nbytes in zip(ends, sizes, strict=True))
    owners = (min(int(middle * size / total), size - 1) for middle in middles)
    return [item for item, owner in zip(work, owners, strict=True) if owner == rank]
