"""Files to be, byte by byte, before the first byte is written.

What lives here: a tensor to be; a file as contents, each literal bytes or tensor data, and its division into units of
work. What may not: what the bytes mean (`writer.py` of `dcp` and of `safetensors`), writing them
(`checkpoint/engine/copying.py`).

Since everything is laid out beforehand, a result does not depend on how many processes write it, or on how often they
were interrupted.
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

# A unit is what one process writes at a time and what an interrupted run need not write again. A multiple of any page
# size, so that two machines never write to the same page of a shared file.
UNIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """One target tensor.

    Attributes:
        target: what it is.
        segments: its elements, in order; cast to its dtype where theirs differs.
        leading: how many of its first dimensions count layers or experts.
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
    """A file to be.

    Attributes:
        name: relative to the result's folder.
        divisible: whether several processes may write parts of it.
        contents: its contents, in order.
        nbytes: how many bytes they are.
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
        """What lies in a unit, as contents; cut where it begins or ends within one."""
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
    """All bytes of some files, in units of `UNIT_BYTES`; where a file ends sooner, so does the unit."""
    return [
        Unit(number, start, min(start + step, file.nbytes))
        for number, file in enumerate(files)
        for step in [UNIT_BYTES if file.divisible else max(file.nbytes, 1)]
        for start in range(0, file.nbytes, step)
    ]


def share[Item](work: Sequence[Item], sizes: Sequence[int], rank: int, size: int) -> list[Item]:
    """What one of several processes does: neighbours, and about as many bytes as the others have.

    Args:
        work: all there is to do.
        sizes: bytes of each.
        rank: which process.
        size: how many there are.
    """
    total, ends = max(sum(sizes), 1), itertools.accumulate(sizes)
    middles = (end - nbytes / 2 for end, nbytes in zip(ends, sizes, strict=True))
    owners = (min(int(middle * size / total), size - 1) for middle in middles)
    return [item for item, owner in zip(work, owners, strict=True) if owner == rank]
