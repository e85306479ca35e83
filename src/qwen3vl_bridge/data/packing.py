"""Which samples share a row: best-fit packing, by tokens and by the patches of their pictures.

What lives here: numbers into rows. What may not: tensors, samples, order of reading (`plan.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(
    lengths: Sequence[int], capacity: int, patches: Sequence[int] | None = None, most_patches: int | None = None
) -> list[list[int]]:
    """Pack samples into rows, the longest first, each where it leaves the least room.

    Args:
        lengths: tokens of each sample.
        capacity: tokens a row holds.
        patches: of the pictures of each sample; not asked about if None.
        most_patches: patches a row holds; any number if None.

    Returns:
        Rows of sample numbers. Rows, and the samples in one, are in ascending order of their first sample.

    Raises:
        ValueError: a length, or a number of patches, that no row holds.
    """
    if patches is None or most_patches is None:
        patches, most_patches = [0] * len(lengths), 1
    # Of the two towers, the one that a sample fills more of decides how hard it is to place.
    share = [max(n / capacity, p / most_patches) for n, p in zip(lengths, patches, strict=True)]
    rows: list[list[int]] = []
    room: list[tuple[int, int, int]] = []  # tokens left in each row, its number, patches left; ascending
    for sample in sorted(range(len(lengths)), key=lambda sample: (-share[sample], sample)):
        length, pixels = lengths[sample], patches[sample]
        if not 1 <= length <= capacity:
            raise ValueError(f"sample {sample} has {length} tokens, expected 1 to {capacity}")
        if not 0 <= pixels <= most_patches:
            raise ValueError(f"sample {sample} has {pixels} patches, expected at most {most_patches}")
        fitting = range(bisect_left(room, (length, 0, 0)), len(room))
        place = next((place for place in fitting if room[place][2] >= pixels), None)
        left, row, left_patches = (capacity, len(rows), most_patches) if place is None else room.pop(place)
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        insort(room, (left - length, row, left_patches - pixels))
    return sorted(sorted(row) for row in rows)


def fill(rows: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> float:
    """The share of real tokens in rows of `capacity`."""
    return sum(lengths[sample] for row in rows for sample in row) / (capacity * len(rows)) if rows else 0.0
