"""torch's errors about data-loading processes that have ended.

Read: the text of these errors. torch raises a plain RuntimeError from its handler of SIGCHLD, in any line of the
main thread, or while it waits for a process. Delete this module when the error has a class.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LOST = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([\w ]+)|exited)")


class LostWorker(NamedTuple):
    """A data-loading process that has ended.

    Attributes:
        process: process id, or several ids separated by commas.
        signal: the name of the signal that ended it; None if it exited.
    """

    process: str
    signal: str | None


def lost_worker(error: BaseException) -> LostWorker | None:
    """Return the data-loading process that has ended according to an error; None for other errors."""
    if not isinstance(error, RuntimeError) or not (found := _LOST.match(str(error))):
        return None
    # torch raises a second error while it waits for the process. Its cause is the handler's error, with the signal.
    found = _LOST.match(str(error.__cause__)) or found
    return LostWorker(found[1], found[2] and found[2].strip())
