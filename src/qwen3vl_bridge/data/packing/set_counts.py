"""Numbers of samples per data set of a mixture; one number for a single data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest

# By index of the data set; trailing zeros may be missing.
SetCounts = tuple[int, ...]


def count_sets(sets: Iterable[int]) -> SetCounts:
    """How often each data set occurs among these."""
    counts = Counter(sets)
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))


def add_counts(first: SetCounts, second: SetCounts) -> SetCounts:
    """Elementwise sum."""
    return tuple(a + b for a, b in zip_longest(first, second, fillvalue=0))


def most_of(first: SetCounts, second: SetCounts) -> SetCounts:
    """Elementwise maximum."""
    return tuple(max(a, b) for a, b in zip_longest(first, second, fillvalue=0))


def counts_since(before: SetCounts, now: SetCounts) -> SetCounts:
    """Elementwise difference of the new and the old counts."""
    return tuple(b - a for a, b in zip_longest(before, now, fillvalue=0))
