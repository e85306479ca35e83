"""What is wrong with someone's data, said so that they can find it.

What lives here: exceptions for data. What may not: anything else.
"""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be trained on. The message names file, line and part, what was found and what was expected."""

    def __init__(self, place: str, problem: str | None = None) -> None:
        """Say where and what.

        Args:
            place: a file, a sample ("train.jsonl:12") or a part of one ("train.jsonl:12: message 3").
            problem: what was found and what was expected. Without it, `place` is the whole message: so torch makes
                the exception anew when it comes from a data-loading worker.
        """
        super().__init__(place if problem is None else f"{place}: {problem}")

    def without_traceback(self) -> DataError:
        """The error as it was raised: torch puts a data-loading worker's whole traceback before the message."""
        return type(self)(str(self).rpartition(f"{type(self).__name__}: ")[2].strip())


class Changed(DataError):
    """A sample that is not what its row was planned for: the plan is of other data, or these are being changed.

    It is no reason to leave the sample out: what the plan says of the others is as wrong.
    """


class Unreachable(DataError):
    """Data that may be good, but cannot be had now: it was not downloaded, the network is down, a stream broke off.

    It is no reason to leave a sample out: the next one would fail as well, and a later run would have it.
    """
