"""Exceptions for data that cannot be used, and messages about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from qwen3vl_bridge.terminal import visible
from qwen3vl_bridge.upstream.worker_errors import lost_worker

_MOST_NAMED = 5  # records listed for one error
# Parts of a message that differ between records with the same error: file names, URLs and numbers. Matching takes
# linear time: paths are searched only at the beginning of a word, without backtracking (`*+`).
_PARTICULARS = re.compile(r"'[^'./]*+[./][^']*+'|(?<![^\s'])[^\s'/]*+/\S*+|\d[\d,.]*+")


class DataError(ValueError):
    """Error for data that cannot be trained on.

    The message names the file, the record and the field, the value found and the expected value.
    """

    def __init__(self, place: str, problem: str | None = None) -> None:
        """Set the message to "PLACE: PROBLEM", with a location such as "train.jsonl:12: message 3" as the place.

        Without `problem`, `place` is the complete message: torch recreates exceptions of data-loading workers this way.
        """
        self.problem = place if problem is None else problem
        super().__init__(place if problem is None else f"{place}: {problem}")

    def with_advice(self, advice: str) -> DataError:
        """Return a copy of the error with `advice` appended to its message."""
        advised = type(self)(f"{self}{advice}")
        advised.problem = self.problem
        return advised

    def without_traceback(self) -> DataError:
        """Return a copy of the error without the worker traceback that torch puts before its message."""
        return type(self)(str(self).rpartition(f"{type(self).__name__}: ")[2].strip())


class SampleSizeChanged(DataError):
    """Error for a sample whose size differs from the size that its row was planned for.

    Either the data have changed, or the rows were planned for other data. Raised even if `on_bad` is "drop".
    """


class DataUnavailable(DataError):
    """Error for data that are temporarily unavailable: not downloaded, network down, stream interrupted.

    Raised even if `on_bad` is "drop".
    """


def describe_lost_worker(error: BaseException, setting: str = "dataset.num_workers") -> str | None:
    """Return a message with advice if `error` reports that a data-loading process died; otherwise None.

    `setting` is the setting for the number of these processes, which the advice names.
    """
    if (lost := lost_worker(error)) is None:
        return None
    process, signal = lost
    how = f"was killed by a signal ({signal})" if signal else "exited without an error message"
    if signal and signal.startswith("Bus error"):
        advice = "Shared memory is full: make /dev/shm larger (docker: --shm-size or --ipc=host), or"
    else:
        advice = (
            "Most likely memory ran out, and the kernel (see `dmesg`) or the memory limit of the job or container "
            "killed "
            "the largest process: give it more memory, or"
        )
    return f"a data-loading process (pid {process}) {how}. {advice} lower {setting}; 0 reads in the main process"


def group_errors(errors: Iterable[tuple[str, str, str]], most: int) -> Iterator[str]:
    """Yield lines of text that group errors by kind: for each kind the first message, then the names of other records.

    Args:
        errors: the name, message and problem of each record (see `DataError.problem`).
        most: maximum number of kinds; for further kinds, only the number of records is given.
    """
    messages, names = dict[str, str](), dict[str, list[str]]()
    for name, message, problem in errors:
        kind = _PARTICULARS.sub("", problem)
        messages.setdefault(kind, message)
        names.setdefault(kind, []).append(name)
    for kind in list(names)[:most]:
        yield visible(messages[kind])
        if others := names[kind][1:]:
            yield f"the same in {len(others):,} more: {name_records(others)}"
    if left := sum(map(len, list(names.values())[most:])):
        yield f"and {left:,} more"


def name_records(names: Sequence[str]) -> str:
    """Return a text with the first five record names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return visible(", ".join(names[:_MOST_NAMED])) + more
