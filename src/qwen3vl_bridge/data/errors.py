"""Exceptions for invalid data, with the place of the error."""

from __future__ import annotations

from typing import Any, get_args


class DataError(ValueError):
    """Data that cannot be trained on. The message names file, line and part, what was found and what was expected."""

    def __init__(self, place: str, problem: str | None = None) -> None:
        """Join a place, such as "train.jsonl:12: message 3", and what was found and what was expected there.

        Without `problem`, `place` is the complete message: torch recreates exceptions of data-loading workers this way.
        """
        self.problem = place if problem is None else problem
        super().__init__(place if problem is None else f"{place}: {problem}")

    def without_traceback(self) -> DataError:
        """The original error: torch puts a data-loading worker's whole traceback before the message."""
        return type(self)(str(self).rpartition(f"{type(self).__name__}: ")[2].strip())


class Changed(DataError):
    """A sample whose size is not that of the plan, which is of other data, or the data change. It is not dropped."""


class Unreachable(DataError):
    """Data that are temporarily unavailable: not downloaded, network down, stream interrupted. They are not dropped."""


def check_choice(name: str, found: object, kind: Any) -> None:
    """Refuse the value of a setting that is not in `kind`, a `Literal`, with a `ValueError`."""
    allowed = get_args(kind)
    if found not in allowed:
        raise ValueError(f"{name} is {found!r}, expected {' or '.join(map(repr, allowed))}")
