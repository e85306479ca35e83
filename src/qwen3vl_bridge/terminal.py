"""Common behaviour of our commands on a terminal.

Standard library only, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import json
import os
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

# Exit status that a shell reports for a command ended by Ctrl-C.
BAD_INPUT, INTERRUPTED = 2, 130
# Categories of characters that a terminal interprets instead of showing.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_SHOWN = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # some scripts and emoji are written with joiners


def show_anything() -> None:
    """Make standard output and error escape what a terminal cannot show: users' texts may contain anything.

    The first thing that a command does; when its process ends, `finish` is called.
    """
    atexit.unregister(finish)
    atexit.register(finish)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(command: Callable[[], int], *expected: type[Exception]) -> int:
    """Run a command and return its exit status; of an expected error only the message is shown."""
    show_anything()
    try:
        return command()
    except expected as error:
        show_error(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        show("interrupted", error=True)
        return INTERRUPTED


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option whose value is a whole number of this size or more."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"found {value}, expected {least} or more")
        return value

    return number


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit."""
        show_error(message)
        self.exit(BAD_INPUT)


def in_bytes(number: float) -> str:
    """A number of bytes, in MB below one GB."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.2f} MB"


def visible(text: str) -> str:
    r"""The text with escaped control and formatting characters, such as \x1b; line breaks and tabs stay."""
    hidden = {one for one in set(text) if one not in _SHOWN and unicodedata.category(one) in _HIDDEN}
    return text.translate({ord(one): ascii(one)[1:-1] for one in hidden})


def show(text: str, *, error: bool = False) -> None:
    """Print a line. If its reader has exited, such as `head`, the command continues.

    The line may contain names and texts of other people's files: characters that would move a cursor or set a title are
    escaped.

    Args:
        text: the line.
        error: whether it goes to standard error, for which no error is raised.

    Raises:
        OSError: standard output cannot be written, such as on a full disk; later output is dropped.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # closed from the beginning
        return
    try:
        print(visible(text), file=stream, flush=True)
    except OSError as failure:
        _drop(stream)
        if not error and not isinstance(failure, BrokenPipeError):
            said = f"standard output cannot be written: {failure.strerror or failure}"
            raise OSError(said) from failure


def show_error(message: str, note: str = "") -> None:
    """Print the error that ends a command, and a note on it.

    Where torchrun has started the process, it prints 25 lines of its own after that: it is given the message to repeat
    at their end, in the file and the form that `torch.distributed.elastic` reads.
    """
    show(f"error: {message}{note}", error=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        reply = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # it has been shown already
            Path(file).write_text(json.dumps({"message": reply}))


def finish() -> None:
    """Drop what standard error still holds if its reader has exited: Python would end with status 120 otherwise.

    Libraries log to it, and ignore that a line could not be written.
    """
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Later output goes nowhere, and so does what is in the buffer: Python flushes it again at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show_report(text: str, result: object) -> None:
    """Print the report on a finished result; a failure to print does not affect the result."""
    try:
        show(text)
    except OSError as error:
        show(f"note: {result} is complete and in place, but its report could not be printed: {error}", error=True)
