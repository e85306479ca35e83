"""Which samples share a row: best-fit packing of lengths.

What lives here: numbers into rows. What may not: tensors, samples, order of reading (`plan.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack samples into rows, the longest first, each where it leaves the least room.

    Args:
        lengths: tokens of each sample.
        capacity: tokens a row holds.

    Returns:
        Rows of sample numbers. Rows, and the samples in one, are in ascending order of their first sample.

    Raises:
        ValueError: a length that no row holds.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left in each row, and its number, ascending
    for sample in sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample)):
        length = lengths[sample]
        if not 1 <= length <= capacity:
            raise ValueError(f"sample {sample} has {length} tokens, expected 1 to {capacity}")
        place = bisect_left(room, (length, 0))
        left, row = room.pop(place) if place < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        insort(room, (left - length, row))
    return sorted(sorted(row) for row in rows)


def fill(rows: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> float:
    """The share of real tokens in rows of `capacity`."""
    return sum(lengths[sample] for row in rows for sample in row) / (capacity * len(rows)) if rows else 0.0
