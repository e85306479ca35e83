"""What of an unfinished result is on disk, so that another run can continue it.

What lives here: the folder beside the unfinished files that says which plan they follow and which parts of them are
proven written. What may not: writing those files (`copying.py`), whether to continue (`staging.py`).

A line names a unit whose bytes have reached the disk. It is written after them, so a process may be killed between the
two, never before. A line without its end counts for nothing.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from qwen3vl_bridge.checkpoint.files import OutputFile, Unit

FOLDER = ".journal"
_PLAN = "plan"
_LINES = "rank-*"


class Journal:
    """One process's part of the journal, locked for as long as it lives."""

    def __init__(self, result: Path, rank: int = 0) -> None:
        """Open it.

        Args:
            result: the unfinished result's folder, in which `begin` was called.
            rank: number of this process.
        """
        path = result / FOLDER / _LINES.replace("*", str(rank))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # ends a line that an earlier process did not

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def note(self, file: OutputFile, unit: Unit, *, sync: bool) -> None:
        """Say that a unit's bytes are on disk."""
        os.write(self._file, _line(file, unit).encode() + b"\n")
        if sync:
            os.fdatasync(self._file)


def begin(result: Path, digest: str) -> None:
    """Start a journal for a plan, or keep the one that follows it already."""
    (result / FOLDER).mkdir(exist_ok=True)
    (result / FOLDER / _PLAN).write_text(digest)


def follows(result: Path, digest: str) -> bool:
    """Whether an unfinished result was begun with the same plan."""
    try:
        return (result / FOLDER / _PLAN).read_text() == digest
    except OSError:
        return False


def is_written_by_another(result: Path) -> bool:
    """Whether a process that has its part of the journal open is alive."""
    for path in (result / FOLDER).glob(_LINES):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def written(result: Path, folder: Path, files: list[OutputFile], work: list[Unit]) -> set[Unit]:
    """Those of some units that are on disk.

    Args:
        result: the unfinished result's folder.
        folder: where in it the files are.
        files: all of them.
        work: the units asked about.
    """
    lines: set[str] = set()
    for path in (result / FOLDER).glob(_LINES):
        lines.update(
            line[:-1] for line in path.read_text(errors="replace").splitlines(keepends=True) if line[-1] == "\n"
        )
    return {unit for unit in work if _line(files[unit.file], unit) in lines and _reaches(folder, files, unit)}


def _reaches(folder: Path, files: list[OutputFile], unit: Unit) -> bool:
    """Whether the file is at least as long as the unit needs; someone may have touched it since."""
    path = folder / files[unit.file].name
    return path.is_file() and path.stat().st_size >= unit.end


def _line(file: OutputFile, unit: Unit) -> str:
    return f"{file.name} {unit.start} {unit.end}"
