"""Best-fit packing: assigns samples to rows by tokens and by the patches of their images."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

_SHELVES, _LOOKS = 16, 32


def best_fit(
    lengths: Sequence[int], capacity: int, patches: Sequence[int] | None = None, most_patches: int | None = None
) -> list[list[int]]:
    """Best-fit decreasing: samples in descending order of size, each into the row with the least space that is
    sufficient.

    Args:
        lengths: tokens of each sample.
        capacity: maximum tokens per row.
        patches: of the images of each sample; None without a limit.
        most_patches: maximum patches per row; None without a limit.

    Returns:
        Rows of sample numbers. Rows, and the samples in one, are in ascending order of their first sample.

    Raises:
        ValueError: a sample that exceeds the tokens or patches of a row.
    """
    if patches is None or most_patches is None:
        patches, most_patches = [0] * len(lengths), 1
    # The size of a sample is the larger of its fractions of a row's tokens and patches.
    share = [max(n / capacity, p / most_patches) for n, p in zip(lengths, patches, strict=True)]
    rows, room = list[list[int]](), _Room(most_patches)
    for sample in sorted(range(len(lengths)), key=lambda sample: (-share[sample], sample)):
        length, pixels = lengths[sample], patches[sample]
        if not 1 <= length <= capacity:
            raise ValueError(f"sample {sample} has {length} tokens, expected 1 to {capacity}")
        if not 0 <= pixels <= most_patches:
            raise ValueError(f"sample {sample} has {pixels} patches, expected at most {most_patches}")
        left, row, left_patches = room.take(length, pixels) or (capacity, len(rows), most_patches)
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        room.put(left - length, row, left_patches - pixels)
    return sorted(sorted(row) for row in rows)


class _Room:
    """Free space of rows, grouped by free patches so that full rows are not searched."""

    def __init__(self, most_patches: int) -> None:
        self._shelves: list[list[tuple[int, int, int]]] = [[] for _ in range(min(_SHELVES, most_patches + 1))]
        self._most = most_patches + 1

    def put(self, tokens: int, row: int, patches: int) -> None:
        if tokens:
            insort(self._shelves[patches * len(self._shelves) // self._most], (tokens, row, patches))

    def take(self, tokens: int, patches: int) -> tuple[int, int, int] | None:
        """Free tokens, number and free patches of the row with the least space that is sufficient; None if there is
        none.
        """
        lowest, found = patches * len(self._shelves) // self._most, []
        for number in range(lowest, len(self._shelves)):
            shelf = self._shelves[number]
            first = bisect_left(shelf, (tokens, 0, 0))
            # Rows of the lowest group may have too few patches; most of them need not be searched.
            fitting = range(first, min(len(shelf), first + _LOOKS))
            place = next((place for place in fitting if shelf[place][2] >= patches), None)
            if place is not None:
                found.append((shelf[place], number, place))
        if not found:
            return None
        entry, number, place = min(found)
        del self._shelves[number][place]
        return entry
