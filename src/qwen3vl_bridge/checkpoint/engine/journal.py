"""Records which parts of an unfinished result are on disk, so that another run can continue it.

A line names a unit whose bytes are on disk, with a digest of them. It is written after them, so a process may be killed
between the two, never before. Incomplete lines are ignored, and so are lines whose bytes no longer have the digest.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from qwen3vl_bridge.checkpoint.engine.progress import Progress
from qwen3vl_bridge.checkpoint.formats.planned_files import OutputFile, Unit
from qwen3vl_bridge.io.atomic import PRIVATE

import xxhash

FOLDER = PRIVATE
_PLAN = "plan"
_LINES = "rank-*"
_BLOCK = 1 << 20

# Digest of a unit's bytes: as fast as memory, so that its cost is negligible next to writing them.
new_digest = xxhash.xxh3_64


class Journal:
    """One process's part of the journal, locked for as long as it lives."""

    def __init__(self, result: Path, rank: int = 0) -> None:
        """Open it.

        Args:
            result: the unfinished result's folder, in which `begin` was called.
            rank: index of this process.
        """
        path = result / FOLDER / _LINES.replace("*", str(rank))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # ends an incomplete line of an earlier process

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def note(self, file: OutputFile, unit: Unit, digest: str, *, sync: bool) -> None:
        """Note that a unit's bytes, with this digest, are on disk."""
        os.write(self._file, f"{_name(file, unit)} {digest}\n".encode())
        if sync:
            os.fdatasync(self._file)


def begin(result: Path, digest: str) -> None:
    """Start a journal for a plan, or keep an existing one for the same plan."""
    if plan_of(result) == digest:
        return
    (result / FOLDER).mkdir(exist_ok=True)
    with (result / FOLDER / _PLAN).open("w") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def plan_of(result: Path) -> str:
    """Digest of an unfinished result's plan; empty if there is none."""
    try:
        return (result / FOLDER / _PLAN).read_text(errors="replace")
    except OSError:
        return ""


def is_written_by_another(result: Path) -> bool:
    """Whether a process that has its part of the journal open is alive."""
    for path in (result / FOLDER).glob(_LINES):
        with path.open("rb+") as file:  # some network file systems lock nothing that is open for reading
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def noted(result: Path, files: list[OutputFile], work: list[Unit]) -> dict[Unit, str]:
    """Those of some units that were noted, with digests of their bytes.

    Args:
        result: the unfinished result's folder.
        files: all of its files.
        work: the units in question.
    """
    digests: dict[str, str] = {}
    for path in (result / FOLDER).glob(_LINES):
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            name, _, digest = line.rpartition(" ")
            if line[-1] == "\n":
                digests[name] = digest[:-1]
    names = {unit: _name(files[unit.file], unit) for unit in work}
    return {unit: digests[name] for unit, name in names.items() if name in digests}


def intact(folder: Path, files: list[OutputFile], units: Iterable[tuple[Unit, str]], meter: Progress) -> list[Unit]:
    """Those of some units whose bytes are unchanged since they were written.

    Args:
        folder: folder of the files.
        files: all of them.
        units: with the digests of what was written.
        meter: receives every block.
    """
    return [
        unit
        for unit, digest in units
        if digest_of(folder / files[unit.file].name, unit.start, unit.end, meter) == digest
    ]


def digest_of(path: Path, start: int, end: int, meter: Progress) -> str | None:
    """Digest of a file's bytes [start, end) on disk; None if they cannot be read."""
    digest, buffer, position = new_digest(), memoryview(bytearray(_BLOCK)), start
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while position < end:
                count = file.readinto(buffer[: end - position])
                if not count:
                    return None
                digest.update(buffer[:count])
                meter.advance(count)
                position += count
    except OSError:
        return None
    return digest.hexdigest()


def _name(file: OutputFile, unit: Unit) -> str:
    return f"{file.name} {unit.start} {unit.end}"
