"""Boxes of a tensor as ranges of its elements in row-major order.

A tensor may be in tens of thousands of boxes, and a box in as many ranges, so complete lists of either are never made.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.formats.tensor_specs import Shape


class Block(NamedTuple):
    """Elements [start, start + length) of a tensor are elements [first, first + length) of the box number `box`."""

    start: int
    length: int
    box: int
    first: int


class _Box(NamedTuple):
    """A box: the elements that it spans, its number, and its ranges.

    Range number i begins at `begin` plus i, written with the digits `counts`, times `strides`; all have `length`.
    """

    begin: int
    end: int
    number: int
    offsets: Shape
    sizes: Shape
    counts: Shape
    strides: Shape
    length: int

    def start_of(self, stretch: int) -> int:
        start = self.begin
        for count, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            stretch, digit = divmod(stretch, count)
            start += digit * stride
        return start

    def blocks(self, start: int, end: int) -> Iterator[Block]:
        """The blocks with elements in [start, end), cut to it, in order."""
        stretches = range(math.prod(self.counts))
        for i in range(max(bisect_right(stretches, start, key=self.start_of) - 1, 0), len(stretches)):
            first = self.start_of(i)
            if first >= end:
                return
            low, high = max(first, start), min(first + self.length, end)
            if low < high:
                yield Block(low, high - low, self.number, i * self.length + low - first)


class Tiling:
    """A tensor cut into boxes."""

    def __init__(self, shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> None:
        """Check the boxes.

        Args:
            shape: the tensor's.
            boxes: (offsets, sizes) of each box, inside the tensor.

        Raises:
            ValueError: an element is in no box, or in two.
        """
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        found = (_box(shape, strides, offsets, sizes, i) for i, (offsets, sizes) in enumerate(boxes))
        # Boxes that interleave, such as blocks of columns, form a group.
        self._groups: list[list[_Box]] = []
        end = 0
        for box in sorted(box for box in found if box is not None):
            if self._groups and box.begin < end:
                self._groups[-1].append(box)
            else:
                self._groups.append([box])
            end = max(end, box.end)
        self._starts = [group[0].begin for group in self._groups]
        for group in self._groups:
            _check_apart(group, strides)
        # Disjoint and inside the tensor: they cover it if they have its number of elements.
        elements = sum(math.prod(box.sizes) for group in self._groups for box in group)
        if elements != math.prod(shape):
            raise ValueError(f"{elements} elements in chunks, expected {math.prod(shape)}")

    def blocks(self, start: int, length: int) -> Iterator[Block]:
        """Elements [start, start + length), in order."""
        end = start + length
        for group in itertools.islice(self._groups, max(bisect_right(self._starts, start) - 1, 0), None):
            if group[0].begin >= end:
                return
            yield from heapq.merge(*(box.blocks(start, end) for box in group))


def _box(shape: Shape, strides: Shape, offsets: Shape, sizes: Shape, number: int) -> _Box | None:
    if math.prod(sizes) == 0:
        return None
    # Dimensions after `whole` are spanned completely, so the box consists of ranges of `length` elements.
    whole = len(shape)
    while whole > 0 and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)
    begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    end = 1 + begin + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return _Box(begin, end, number, offsets, sizes, sizes[:outer], strides[:outer], math.prod(sizes[outer:]))


def _check_apart(group: list[_Box], strides: Shape) -> None:
    """Check that no element is in two boxes."""
    begins = [box.begin for box in group]
    for i, one in enumerate(group):
        for other in group[i + 1 : bisect_left(begins, one.end)]:
            low = tuple(map(max, one.offsets, other.offsets))
            high = (
                min(o + s, p + t) for o, s, p, t in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            )
            if all(a < b for a, b in zip(low, high, strict=True)):
                element = sum(offset * stride for offset, stride in zip(low, strides, strict=True))
                raise ValueError(f"element {element} is in two chunks")
