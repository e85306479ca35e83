"""Files planned byte by byte before the first byte is written, writing them, and the journal of what is on disk.

Because everything is laid out beforehand, a result does not depend on the number of processes that write it, or on
interruptions. A line of the journal names a unit whose bytes are on disk, with a digest of them. It is written after
them, so a process may be killed between the two, never before. Incomplete lines are ignored, and so are lines whose
bytes no longer have the digest.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, SegmentReader, Segments, TensorSource, TensorSpec
from qwen3vl_bridge.checkpoint.processes import Progress
from qwen3vl_bridge.io.atomic import scratch_of
from qwen3vl_bridge.io.files import CheckpointError

import xxhash

# A unit is what one process writes at a time, and what a resumed run need not write again. It is a multiple of any page
# size, so that two machines never write to the same page of a shared file.
UNIT_BYTES = 256 << 20
# Smaller than the incoming blocks, so that those go to the file without another copy.
_BUFFER = 1 << 16
_PLAN, _LINES = "plan", "rank-*"

# Digest of a unit's bytes: as fast as memory, so that its cost is negligible next to writing them.
_new_digest = xxhash.xxh3_64


@dataclass(frozen=True, slots=True)
class Task:
    """One target tensor."""

    target: TensorSpec
    segments: Segments  # its elements, in order; cast to its dtype if theirs differs
    leading: int = 0  # number of its leading dimensions that count layers or experts


@dataclass(frozen=True, slots=True)
class Data:
    """Elements of a tensor: `segments` cut to [start, start + length), in `dtype`."""

    segments: Segments
    dtype: str
    start: int
    length: int

    def __len__(self) -> int:
        return self.length * ITEMSIZE[self.dtype]


Content = bytes | Data


class Unit(NamedTuple):
    """Bytes [start, end) of the file number `file`."""

    file: int
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.end - self.start


@dataclass
class OutputFile:
    """A planned file, its contents in order."""

    name: str  # relative to the result's folder
    divisible: bool = True  # whether several processes may write parts of it
    contents: list[Content] = field(default_factory=list)
    nbytes: int = 0

    def append(self, content: Content) -> None:
        """Add a content at the end."""
        self.contents.append(content)
        self.nbytes += len(content)

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.contents), initial=0))

    def contents_of(self, unit: Unit) -> Iterator[Content]:
        """Contents of a unit, cut at its beginning and end."""
        at = bisect_right(self._starts, unit.start) - 1
        position = unit.start
        while position < unit.end:
            content, first = self.contents[at], self._starts[at]
            take = min(unit.end, first + len(content)) - position
            if take:
                yield content if take == len(content) else _cut(content, position - first, take)
            position, at = position + take, at + 1


def _cut(content: Content, start: int, nbytes: int) -> Content:
    if isinstance(content, bytes):
        return content[start : start + nbytes]
    size = ITEMSIZE[content.dtype]
    if start % size or nbytes % size:
        raise AssertionError(f"a cut at byte {start} of a content with elements of {size}")
    return Data(content.segments, content.dtype, content.start + start // size, nbytes // size)


def units(files: Sequence[OutputFile]) -> list[Unit]:
    """All bytes of some files, in units of `UNIT_BYTES`; the last unit of a file may be shorter."""
    return [
        Unit(number, start, min(start + step, file.nbytes))
        for number, file in enumerate(files)
        for step in [UNIT_BYTES if file.divisible else max(file.nbytes, 1)]
        for start in range(0, file.nbytes, step)
    ]


def share[Item](work: Sequence[Item], sizes: Sequence[int], rank: int, size: int) -> list[Item]:
    """The part of one of `size` processes: neighbouring units with about the same number of bytes for each."""
    total, ends = max(sum(sizes), 1), itertools.accumulate(sizes)
    middles = (end - nbytes / 2 for end, nbytes in zip(ends, sizes, strict=True))
    owners = (min(int(middle * size / total), size - 1) for middle in middles)
    return [item for item, owner in zip(work, owners, strict=True) if owner == rank]


class Journal:
    """One process's part of an unfinished result's journal, locked for as long as it lives."""

    def __init__(self, result: Path, rank: int = 0) -> None:
        """Open it, of a result for which `begin` was called."""
        path = scratch_of(result) / _LINES.replace("*", str(rank))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # ends an incomplete line of an earlier process

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def note(self, file: OutputFile, unit: Unit, digest: str, written: int) -> None:
        """Note that a unit's bytes, with this digest, are in an open file, once they are on disk."""
        os.fdatasync(written)
        os.write(self._file, f"{_name(file, unit)} {digest}\n".encode())
        os.fdatasync(self._file)


def begin(result: Path, digest: str) -> None:
    """Start a journal for a plan, or keep an existing one for the same plan."""
    if plan_of(result) == digest:
        return
    scratch_of(result).mkdir(exist_ok=True)
    with (scratch_of(result) / _PLAN).open("w") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def plan_of(result: Path) -> str:
    """Digest of an unfinished result's plan; empty if there is none."""
    try:
        return (scratch_of(result) / _PLAN).read_text(errors="replace")
    except OSError:
        return ""


def is_written_by_another(result: Path) -> bool:
    """Whether a process that has its part of the journal open is alive."""
    for path in scratch_of(result).glob(_LINES):
        with path.open("rb+") as file:  # some network file systems lock nothing that is open for reading
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def noted(result: Path, files: list[OutputFile], work: list[Unit]) -> dict[Unit, str]:
    """Those units of an unfinished result's files that were noted, with digests of their bytes."""
    digests: dict[str, str] = {}
    for path in scratch_of(result).glob(_LINES):
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            name, _, digest = line.rpartition(" ")
            if line[-1] == "\n":
                digests[name] = digest[:-1]
    names = {unit: _name(files[unit.file], unit) for unit in work}
    return {unit: digests[name] for unit, name in names.items() if name in digests}


def _name(file: OutputFile, unit: Unit) -> str:
    return f"{file.name} {unit.start} {unit.end}"


def intact(folder: Path, files: list[OutputFile], work: Iterable[tuple[Unit, str]], meter: Progress) -> list[Unit]:
    """Those of some units whose bytes still have the digests of what was written."""
    return [
        unit
        for unit, digest in work
        if digest_of(folder / files[unit.file].name, unit.start, unit.end, meter) == digest
    ]


def digest_of(path: Path, start: int, end: int, meter: Progress) -> str | None:
    """Digest of a file's bytes [start, end) on disk; None if they cannot be read."""
    digest, buffer, position = _new_digest(), memoryview(bytearray(1 << 20)), start
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


def write_units(
    folder: Path,
    files: Sequence[OutputFile],
    work: Iterable[Unit],
    source: TensorSource,
    journal: Journal,
    meter: Progress,
    threads: int,
) -> None:
    """Write units and note in the journal those that are on disk.

    While one of the threads waits for the disk, another reads and transposes its unit.
    """
    readers: SimpleQueue[SegmentReader] = SimpleQueue()

    def write(unit: Unit) -> None:
        reader = readers.get()
        try:
            _write_unit(folder, files[unit.file], unit, reader, meter, journal)
        finally:
            readers.put(reader)

    with ExitStack() as stack, ThreadPoolExecutor(threads, "write") as pool:
        for _ in range(threads):
            readers.put(stack.enter_context(SegmentReader(source)))
        try:
            deque(pool.map(write, work), maxlen=0)
        finally:  # whatever ends this thread, such as a signal, ends the others after their unit
            pool.shutdown(cancel_futures=True)


def _write_unit(
    folder: Path, output: OutputFile, unit: Unit, reader: SegmentReader, meter: Progress, journal: Journal
) -> None:
    handle = os.open(folder / output.name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb", buffering=_BUFFER) as file:
        file.seek(unit.start)
        digest = _new_digest()
        for content in output.contents_of(unit):
            if isinstance(content, bytes):
                blocks: Iterable[memoryview] = [memoryview(content)]
            else:
                blocks = reader.blocks(content.segments.cut(content.start, content.length), content.dtype)
            written = 0
            for block in meter.counted(blocks):
                written += file.write(block)
                digest.update(block)
            if written != len(content):
                raise AssertionError(f"{output.name}: {written} bytes written of {len(content)}")
        file.flush()
        journal.note(output, unit, digest.hexdigest(), handle)


def check_sizes(folder: Path, files: Sequence[OutputFile]) -> None:
    """Raise a CheckpointError for a file that does not have its planned size."""
    for output in files:
        path, size = folder / output.name, 0
        if path.is_file():
            with path.open("rb") as file:  # only then a network file system asks its server
                size = os.fstat(file.fileno()).st_size
        if size != output.nbytes:
            raise CheckpointError(f"{path} has {size} bytes, expected {output.nbytes}")
