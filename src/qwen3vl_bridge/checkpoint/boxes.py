"""Boxes of a tensor as stretches of its elements in row-major order.

What lives here: that arithmetic, and the check that boxes cover a tensor exactly once. What may not: files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.tensors import Shape


class Block(NamedTuple):
    """Elements [start, start + length) of a tensor are elements [first, first + length) of the box number `box`."""

    start: int
    length: int
    box: int
    first: int


def linear_blocks(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> list[Block]:
    """All elements of a tensor, in order.

    Args:
        shape: the tensor's.
        boxes: (offsets, sizes) of each box, inside the tensor.

    Raises:
        ValueError: an element is in no box, or in two.
    """
    blocks = [block for i, (offsets, sizes) in enumerate(boxes) for block in _blocks_of(shape, offsets, sizes, i)]
    blocks.sort()
    position = 0
    for block in blocks:
        if block.start != position:
            first, count = min(block.start, position), "no chunk" if block.start > position else "two chunks"
            raise ValueError(f"element {first} is in {count}")
        position += block.length
    if position != math.prod(shape):
        raise ValueError(f"{position} elements in chunks, expected {math.prod(shape)}")
    return blocks


def _blocks_of(shape: Shape, offsets: Shape, sizes: Shape, box: int) -> Iterator[Block]:
    if math.prod(sizes) == 0:
        return
    # Dimensions behind `whole` are spanned wholly, so the box is made of stretches of `count` elements.
    whole = len(shape)
    while whole > 0 and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)
    count = math.prod(sizes[outer:])
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*(range(size) for size in sizes[:outer]))):
        start = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield Block(start, count, box, number * count)
