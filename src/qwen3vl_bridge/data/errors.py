"""Exceptions for invalid data, with the place of the error."""

from __future__ import annotations

from typing import Any, get_args


class DataError(ValueError):
    """Data that cannot be trained on. The message names file, line and part, what was found and what was expected."""

    def __init__(self, place: str, problem: str | None = None) -> None:
        """Create the message from place and problem.

        Args:
            place: a file, a sample ("train.jsonl:12") or a part of one ("train.jsonl:12: message 3").
            problem: what was found and what was expected. Without it, `place` is the complete message, because torch
                recreates exceptions of data-loading workers this way.
        """
        super().__init__(place if problem is None else f"{place}: {problem}")

    def without_traceback(self) -> DataError:
        """The original error: torch puts a data-loading worker's whole traceback before the message."""
        return type(self)(str(self).rpartition(f"{type(self).__name__}: ")[2].strip())


class Changed(DataError):
    """A sample whose size differs from the plan: the plan is of other data, or the data are being changed.

    The sample is not dropped, because the plan is wrong for the other samples too.
    """


class Unreachable(DataError):
    """Data that are temporarily unavailable: not downloaded, network down, stream interrupted.

    The sample is not dropped, because the next one would fail as well, and a later run could read it.
    """


def check_choice(name: str, found: object, kind: Any) -> None:
    """Refuse a value that is not in the set.

    Args:
        name: name of the setting.
        found: its value.
        kind: a `Literal` of the allowed values.

    Raises:
        ValueError: the value is not allowed.
    """
    allowed = get_args(kind)
    if found not in allowed:
        raise ValueError(f"{name} is {found!r}, expected {' or '.join(map(repr, allowed))}")
