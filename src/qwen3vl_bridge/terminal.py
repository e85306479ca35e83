"""What our commands have in common with other commands of a terminal.

What lives here: exit statuses, and output that no text and no reader can break. What may not: options and what commands
do. Standard library only, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import unicodedata

# As a shell reports a command that was ended by the signal of Ctrl-C.
BAD_INPUT, INTERRUPTED = 2, 130
# Categories of characters that a terminal obeys and does not show.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_SHOWN = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # some scripts and emoji are written with joiners


def show_anything() -> None:
    """Let standard output and error show by number what a terminal cannot: names and texts of users may hold it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def visible(text: str) -> str:
    r"""The text with control and formatting characters by their numbers, such as \x1b; line breaks and tabs stay."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    hidden = character not in _SHOWN and unicodedata.category(character) in _HIDDEN
    return ascii(character)[1:-1] if hidden else character


def show(text: str, *, error: bool = False) -> None:
    """Print a line. When its reader has gone, such as `head`, what was to be done is still done.

    It may have names and texts of other people's files: what would move a cursor or set a title is shown instead.

    Args:
        text: the line.
        error: whether it goes to standard error, of which nothing is raised.

    Raises:
        OSError: standard output cannot be written, such as on a full disk; what comes later is dropped.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # closed from the beginning
        return
    try:
        print(visible(text), file=stream, flush=True)
    except OSError as failure:
        with contextlib.suppress(OSError, ValueError):  # else Python fails once more when it flushes at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not error and not isinstance(failure, BrokenPipeError):
            said = f"standard output cannot be written: {failure.strerror or failure}"
            raise OSError(said) from failure


def show_report(text: str, result: object) -> None:
    """Print the report on a result that is in place: that the report is lost is no failure of the result."""
    try:
        show(text)
    except OSError as error:
        show(f"note: {result} is complete and in place, but its report could not be printed: {error}", error=True)
