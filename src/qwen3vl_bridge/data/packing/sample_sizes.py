"""Sizes of samples, as far as they are known."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol

_UNKNOWN = -1

# What may happen to a sample: dropped, truncated, or found to be unreadable when its row was due.
Left = Literal["dropped", "cut", "unreadable"]


class Size(NamedTuple):
    """Space that a sample takes in a row. Without tokens it is in no row.

    Attributes:
        tokens: of the language model.
        patches: of the vision tower.
        patch_pairs: sum over frames of the squared number of patches, the cost of the vision tower's attention.
    """

    tokens: int
    patches: int
    patch_pairs: int

    def padded(self, multiple: int) -> Size:
        """The size with tokens padded to a multiple."""
        return self._replace(tokens=-(-self.tokens // multiple) * multiple)


NOTHING = Size(0, 0, 0)


class Sizes(Protocol):
    """Sizes of samples by their numbers."""

    def get(self, sample: int) -> Size | None:
        """A sample's size, None if it has not been measured."""
        ...

    def keep(self, sample: int, size: Size) -> None:
        """Store a measured size."""
        ...

    def claim(self, sample: int, *, wait: bool) -> AbstractContextManager[bool]:
        """Lock a sample while it is measured, so that no other process measures it too.

        Args:
            sample: its number.
            wait: for another process that holds the lock, which then has measured it, or has died.

        Returns:
            A context: whether this process holds the lock.
        """
        return nullcontext(True)

    def note(self, kind: Left) -> int:
        """Count a sample that is dropped or truncated.

        Returns:
            The number of such samples including it, over the processes that share sizes.
        """
        ...


class OwnNotes:
    """Counts of only one process."""

    def __init__(self) -> None:
        self._noted = dict[Left, int]()

    def note(self, kind: Left) -> int:
        """See `Sizes`."""
        self._noted[kind] = self._noted.get(kind, 0) + 1
        return self._noted[kind]


class AllSizes(OwnNotes, Sizes):
    """Sizes of samples 0 to n - 1."""

    def __init__(self, num_samples: int) -> None:
        """Start without any size."""
        super().__init__()
        self._columns = tuple(array("q", [_UNKNOWN]) * num_samples for _ in Size._fields)

    def get(self, sample: int) -> Size | None:
        """See `Sizes`."""
        return None if self._columns[0][sample] == _UNKNOWN else Size(*(column[sample] for column in self._columns))

    def keep(self, sample: int, size: Size) -> None:
        """See `Sizes`."""
        for column, value in zip(self._columns, size, strict=True):
            column[sample] = value


class LatestSizes(OwnNotes, Sizes):
    """Sizes of the most recently measured samples, whatever their numbers: those of a stream, which has no end."""

    def __init__(self, most: int = 2**16, note: Callable[[Left], int] | None = None) -> None:
        """Start without any size.

        Args:
            most: maximum number of sizes that are kept.
            note: counts dropped and truncated samples of several processes (see `Sizes.note`); None to count only
                those of this process.
        """
        super().__init__()
        self._most, self._kept, self._others = most, OrderedDict[int, Size](), note

    def note(self, kind: Left) -> int:
        """See `Sizes`."""
        return super().note(kind) if self._others is None else self._others(kind)

    def get(self, sample: int) -> Size | None:
        """See `Sizes`."""
        return self._kept.get(sample)

    def keep(self, sample: int, size: Size) -> None:
        """See `Sizes`."""
        self._kept[sample] = size
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
