"""Exceptions for invalid data, with the place of the error, and the check of settings with a fixed set of values."""

from __future__ import annotations

from typing import Any, get_args


class DataError(ValueError):
    """Data that cannot be trained on. The message names file, line and part, what was found and what was expected."""

    def __init__(self, place: str, problem: str | None = None) -> None:
        """Create the message from a place, such as "train.jsonl:12: message 3", and a problem.

        Without a problem, `place` is the complete message: torch recreates exceptions of data-loading workers this way.
        """
        super().__init__(place if problem is None else f"{place}: {problem}")

    def without_traceback(self) -> DataError:
        """The original error: torch puts a data-loading worker's whole traceback before the message."""
        return type(self)(str(self).rpartition(f"{type(self).__name__}: ")[2].strip())


class Changed(DataError):
    """A sample whose size differs from the plan, which is therefore wrong for the other samples too: never dropped."""


class Unreachable(DataError):
    """Data that are temporarily unavailable: not downloaded, network down, stream interrupted.

    Never dropped: the next sample would fail as well, and a later run could read it.
    """


def check_choice(name: str, found: object, kind: Any) -> None:
    """Refuse a setting's value that is not one of the `Literal` of allowed values (ValueError)."""
    allowed = get_args(kind)
    if found not in allowed:
        raise ValueError(f"{name} is {found!r}, expected {' or '.join(map(repr, allowed))}")
