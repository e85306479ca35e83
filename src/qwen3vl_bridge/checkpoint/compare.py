"""Compares tensors of two sources as streams.

What lives here: where two streams of bytes differ. What may not: plans, files.
"""

from __future__ import annotations

from collections.abc import Iterator

from qwen3vl_bridge.checkpoint.reports import Difference
from qwen3vl_bridge.checkpoint.tensors import ITEMSIZE

import numpy as np


def _paired(one: Iterator[memoryview], other: Iterator[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Two streams of the same length as pieces of the same length."""
    left, right = next(one, None), next(other, None)
    while left is not None and right is not None:
        count = min(len(left), len(right))
        yield left[:count], right[:count]
        left = left[count:] if len(left) > count else next(one, None)
        right = right[count:] if len(right) > count else next(other, None)
    if left is not None or right is not None:
        raise AssertionError("streams of different length")


def difference(
    name: str, numel: int, dtype: str, one: Iterator[memoryview], other: Iterator[memoryview]
) -> Difference | None:
    """Where two streams of a tensor differ.

    Args:
        name: the tensor.
        numel: its number of elements.
        dtype: dtype of both streams.
        one: its bytes.
        other: its bytes.

    Returns:
        The difference, None if there is none.
    """
    size = ITEMSIZE[dtype]
    position, count, first = 0, 0, -1
    for left, right in _paired(one, other):
        unequal = np.frombuffer(left, f"u{size}") != np.frombuffer(right, f"u{size}")
        here = int(np.count_nonzero(unequal))
        if here and not count:
            first = position + int(np.argmax(unequal))
        count += here
        position += len(unequal)
    return Difference(name, count, first, numel) if count else None
