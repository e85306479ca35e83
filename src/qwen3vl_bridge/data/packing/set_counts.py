"""How many samples of each set, where several are mixed; one number where there is one.

What lives here: counting and adding. What may not: which set a sample is of (`data/sources/mixture.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest

# By the sets' numbers; sets after the last that has any may be missing.
SetCounts = tuple[int, ...]


def count_sets(sets: Iterable[int]) -> SetCounts:
    """How often each set occurs among these."""
    counts = Counter(sets)
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))


def add_counts(first: SetCounts, second: SetCounts) -> SetCounts:
    """Both together."""
    return tuple(a + b for a, b in zip_longest(first, second, fillvalue=0))


def most_of(first: SetCounts, second: SetCounts) -> SetCounts:
    """Of each set the larger number."""
    return tuple(max(a, b) for a, b in zip_longest(first, second, fillvalue=0))


def counts_since(before: SetCounts, now: SetCounts) -> SetCounts:
    """Of each set how many more there are now."""
    return tuple(b - a for a, b in zip_longest(before, now, fillvalue=0))
