"""How large samples are, as far as it is known.

What lives here: what a size is, and keeping sizes that were measured. What may not: measuring
(`data/processing/encoding.py`), sizes on disk (`packed_rows.py`), and those of other processes (`shared_sizes.py`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol

_UNKNOWN = -1

# What may become of a sample: left out, cut, or found bad when its row was due.
Left = Literal["dropped", "cut", "unreadable"]


class Size(NamedTuple):
    """How much of a row a sample takes. No tokens: it is in no row.

    Attributes:
        tokens: of the language model.
        patches: of the vision tower.
        patch_pairs: the squares of the patches of each frame, added up: what attention in the vision tower costs.
    """

    tokens: int
    patches: int
    patch_pairs: int

    def padded(self, multiple: int) -> Size:
        """With what fills it up to a multiple of so many tokens."""
        return self._replace(tokens=-(-self.tokens // multiple) * multiple)


NOTHING = Size(0, 0, 0)


class Sizes(Protocol):
    """Sizes of samples by their numbers."""

    def get(self, sample: int) -> Size | None:
        """A sample's size, None if nobody measured it."""
        ...

    def keep(self, sample: int, size: Size) -> None:
        """Remember a measured size."""
        ...

    def claim(self, sample: int, *, wait: bool) -> AbstractContextManager[bool]:
        """Hold a sample while it is measured, so that no other process measures it too.

        Args:
            sample: it.
            wait: for another process that holds it, which then has measured it, or has died.

        Returns:
            A context: whether this process holds it.
        """
        return nullcontext(True)

    def note(self, kind: Left) -> int:
        """Count a sample that is left out or cut.

        Returns:
            How many of its kind there are with it, among the processes that measure for each other.
        """
        ...


class OwnNotes:
    """Notes of one process alone."""

    def __init__(self) -> None:
        self._noted = dict[Left, int]()

    def note(self, kind: Left) -> int:
        """As `Sizes` has it."""
        self._noted[kind] = self._noted.get(kind, 0) + 1
        return self._noted[kind]


class AllSizes(OwnNotes, Sizes):
    """Of samples 0 to n - 1."""

    def __init__(self, num_samples: int) -> None:
        """Know none yet."""
        super().__init__()
        self._columns = tuple(array("q", [_UNKNOWN]) * num_samples for _ in Size._fields)

    def get(self, sample: int) -> Size | None:
        """As `Sizes` has it."""
        return None if self._columns[0][sample] == _UNKNOWN else Size(*(column[sample] for column in self._columns))

    def keep(self, sample: int, size: Size) -> None:
        """As `Sizes` has it."""
        for column, value in zip(self._columns, size, strict=True):
            column[sample] = value


class LatestSizes(OwnNotes, Sizes):
    """Of the samples that were measured last, whatever their numbers: those of a stream, which has no end."""

    def __init__(self, most: int = 2**16, note: Callable[[Left], int] | None = None) -> None:
        """Know none yet.

        Args:
            most: how many to know at a time.
            note: counts samples that are left out together with other processes (see `Sizes.note`); None to count
                alone.
        """
        super().__init__()
        self._most, self._kept, self._others = most, OrderedDict[int, Size](), note

    def note(self, kind: Left) -> int:
        """As `Sizes` has it."""
        return super().note(kind) if self._others is None else self._others(kind)

    def get(self, sample: int) -> Size | None:
        """As `Sizes` has it."""
        return self._kept.get(sample)

    def keep(self, sample: int, size: Size) -> None:
        """As `Sizes` has it."""
        self._kept[sample] = size
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
