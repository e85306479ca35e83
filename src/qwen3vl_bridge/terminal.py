"""Print the output and the errors of all commands in the same way, and return the same exit codes.

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

# Exit codes. A shell reports 130 for a command that Ctrl-C has ended.
BAD_INPUT, INTERRUPTED = 2, 130
# Unicode categories of characters that a terminal interprets instead of showing.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_SHOWN = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # some scripts and emoji are written with joiners


def escape_unprintable() -> None:
    """Make standard output and standard error escape characters that they cannot encode. Commands call this first.

    Also call `flush_errors` when the process ends.
    """
    atexit.unregister(flush_errors)
    atexit.register(flush_errors)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(command: Callable[[], int], *expected: type[Exception]) -> int:
    """Run a command and return its exit code. For the exception types `expected`, show only the message."""
    escape_unprintable()
    try:
        return command()
    except expected as error:
        show_error(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        show("interrupted", error=True)
        return INTERRUPTED


def at_least(least: int) -> Callable[[str], int]:
    """Return a function, to be used as an argparse `type`, that parses integers of at least `least`."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"found {value}, expected {least} or more")
        return value

    return number


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print an error message and exit with code `BAD_INPUT`."""
        show_error(message)
        self.exit(BAD_INPUT)


def in_bytes(number: float) -> str:
    """Format a number of bytes in GB, or in MB if it is below one GB."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.2f} MB"


def visible(text: str) -> str:
    r"""Escape control and formatting characters such as \x1b in a text, except line breaks and tabs."""
    hidden = {one for one in set(text) if one not in _SHOWN and unicodedata.category(one) in _HIDDEN}
    return text.translate({ord(one): ascii(one)[1:-1] for one in hidden})


def show(text: str, *, error: bool = False) -> None:
    """Print a line, with control characters escaped. Drop the line if the reader of a pipe (such as `head`) has exited.

    Args:
        text: the line.
        error: whether to print to standard error. Failures to write there are ignored.

    Raises:
        OSError: standard output cannot be written, such as on a full disk. Later output is dropped.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # closed from the beginning
        return
    try:
        print(visible(text), file=stream, flush=True)
    except OSError as failure:
        _drop(stream)
        if not error and not isinstance(failure, BrokenPipeError):
            raise OSError(f"standard output cannot be written: {failure.strerror or failure}") from failure


def show_error(message: str, note: str = "") -> None:
    """Print the error that ends a command, followed by `note`. Under torchrun, make torchrun repeat the message."""
    show(f"error: {message}{note}", error=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        reply = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # the message has been shown already
            Path(file).write_text(json.dumps({"message": reply}))


def flush_errors() -> None:
    """Flush standard error, or drop the buffered text if the reader has exited."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, also for the buffered text that Python flushes when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show_report(text: str, result: object) -> None:
    """Print a report about a finished result. If that fails, print a note to standard error instead of raising.

    The note calls the result `result`, such as its path.
    """
    try:
        show(text)
    except OSError as error:
        show(f"note: {result} is complete and in place, but its report could not be printed: {error}", error=True)
