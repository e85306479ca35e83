"""What our commands have in common with other commands of a terminal.

What lives here: exit statuses, and output that no text can break. What may not: options and what commands do. Standard
library only, so that `--help` answers at once.
"""

from __future__ import annotations

import io
import sys

# As a shell reports a command that was ended by the signal of Ctrl-C.
BAD_INPUT, INTERRUPTED = 2, 130


def show_anything() -> None:
    """Let standard output and error show by number what a terminal cannot: names and texts of users may hold it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
