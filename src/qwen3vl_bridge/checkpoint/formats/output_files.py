"""Output files: planned byte by byte, then written by one or several processes, with a journal to resume from.

The place of every byte is known before the first byte is written. So the files do not depend on the number of
processes or on interruptions. Processes write byte ranges of at most `RANGE_BYTES`. When a range is on disk, its writer
adds a line with the range and a digest of its bytes to the journal. A resumed run writes all ranges that the journal
does not list. It ignores incomplete lines, and lines with a digest that the bytes no longer have.
"""

from __future__ import annotations

import datetime
import fcntl
import itertools
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from qwen3vl_bridge.checkpoint.formats.tensors import (
    ITEMSIZE,
    ByteRange,
    SliceList,
    SliceReader,
    TensorSource,
    TensorSpec,
)
from qwen3vl_bridge.core.atomic import scratch_folder
from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.terminal import in_bytes, show

import xxhash

# Maximum size of a range. It is a multiple of any page size, so that two machines never write to the same page of a
# shared file.
RANGE_BYTES = 256 << 20
# Smaller than the incoming blocks, so that those go to the file without another copy.
_BUFFER_BYTES = 1 << 16
_PLAN, _LINES = "plan", "rank-*"
# As fast as memory, so that hashing costs little compared with writing.
_new_digest = xxhash.xxh3_64

# How long processes wait for each other to start, and for each other's work. A process that dies while working is
# noticed at once.
_START_TIMEOUT, _WORK_TIMEOUT = datetime.timedelta(minutes=10), datetime.timedelta(hours=12)
_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True, slots=True)
class Task:
    """A tensor to write, and the slices of the source that contain its elements."""

    target: TensorSpec
    slices: SliceList  # elements of the tensor; elements of another dtype are cast to the tensor's dtype
    leading: int = 0  # number of leading dimensions that count layers or experts


@dataclass(frozen=True, slots=True)
class TensorData:
    """Elements [start, start + length) of `slices`, cast to `dtype`, as contents of a file."""

    slices: SliceList
    dtype: str
    start: int
    length: int

    def __len__(self) -> int:
        return self.length * ITEMSIZE[self.dtype]


Content = bytes | TensorData


@dataclass
class OutputFile:
    """A file to be written, as a list of its contents in order: bytes, or elements of tensors."""

    name: str  # relative to the folder of the result
    divisible: bool = True  # whether several processes may write to it
    contents: list[Content] = field(default_factory=list)
    nbytes: int = 0

    def append(self, content: Content) -> None:
        """Add contents at the end of the file."""
        self.contents.append(content)
        self.nbytes += len(content)

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.contents), initial=0))

    def contents_of(self, part: ByteRange) -> Iterator[Content]:
        """Yield the contents of a byte range of the file."""
        i, position = bisect_right(self._starts, part.offset) - 1, part.offset
        while position < part.end:
            content, first = self.contents[i], self._starts[i]
            count = min(part.end, first + len(content)) - position
            if count == len(content):
                yield content
            elif count and isinstance(content, bytes):
                yield content[position - first : position - first + count]
            elif count and isinstance(content, TensorData):
                size, start = ITEMSIZE[content.dtype], position - first
                if start % size or count % size:
                    raise AssertionError(
                        f"{self.name}: the range [{position}, {position + count}) of bytes cuts an element of {size} "
                        f"bytes ({content.dtype}), expected complete elements. Please report this"
                    )
                yield TensorData(content.slices, content.dtype, content.start + start // size, count // size)
            position, i = position + count, i + 1


def split_files(files: Sequence[OutputFile]) -> list[ByteRange]:
    """Split files into byte ranges of `RANGE_BYTES`. A file with `divisible=False` becomes a single range."""
    return [
        ByteRange(Path(file.name), start, min(step, file.nbytes - start))
        for file in files
        for step in [RANGE_BYTES if file.divisible else max(file.nbytes, 1)]
        for start in range(0, file.nbytes, step)
    ]


class Ranks:
    """The processes that share a conversion. They communicate over gloo.

    Without arguments this is a single process. `from_torchrun` connects the processes that torchrun started. Use the
    object as a context manager, so that all processes close the connections together. If a process dies, the next
    collective fails in the others.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        self._started = False

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._group is None:
            return
        import torch.distributed as dist

        # If a process simply exits, gloo's threads in another process abort that process.
        if kind is None:
            self.all_gather(lambda: None)
        dist.destroy_process_group(None if self._started else self._group)
        self._group = None

    @classmethod
    def from_torchrun(cls) -> Ranks:
        """Connect the processes that torchrun started. Return a single process if there are no others.

        Raises:
            CheckpointError: the environment variables are wrong, or the processes cannot reach each other.
        """
        number = os.environ.get("WORLD_SIZE", "1")
        if not number.isdecimal() or int(number) < 1:
            raise CheckpointError(f"WORLD_SIZE is {number!r}, expected the number of processes")
        size = int(number)
        if size == 1:
            return cls()
        import torch.distributed as dist

        start_group = not dist.is_initialized()
        if start_group:
            # torch does not check these before it waits for the other processes.
            rank = os.environ.get("RANK", "0")
            if not rank.isdecimal() or int(rank) >= size:
                raise CheckpointError(f"RANK is {rank!r}, expected 0 to {size - 1} for WORLD_SIZE {size}")
            if os.environ.get("MASTER_PORT", "").isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ:
                minutes = int(_START_TIMEOUT.total_seconds() // 60)
                show(
                    f"WORLD_SIZE is {size}, but torchrun did not start this process (rank {rank}): waiting up to "
                    f"{minutes} minutes for the other processes; unset WORLD_SIZE to run as a single process",
                    error=True,
                )
        try:
            if start_group:
                dist.init_process_group("gloo", timeout=_START_TIMEOUT)
            ranks = cls(dist.get_rank(), dist.get_world_size())
            ranks._started = start_group
            ranks._group = dist.new_group(backend="gloo", timeout=_WORK_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"WORLD_SIZE is {size}, but the processes cannot connect to each other: {error}; expected processes "
                "started by torchrun, or no WORLD_SIZE for a single process"
            ) from error
        return ranks

    @property
    def first(self) -> bool:
        """Return True in process 0."""
        return self.rank == 0

    def all_gather[Result](self, work: Callable[[], Result]) -> list[Result]:
        """Call a function in every process and return all results. If one process fails, all raise an error."""
        if self.size == 1:
            return [work()]
        import torch.distributed as dist

        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # of any kind: the other processes must not wait for this one
            error = failure
        outcomes: list[Any] = [None] * self.size
        mine = (result, None if error is None else f"{error}" or type(error).__name__)
        try:
            dist.all_gather_object(outcomes, mine, group=self._group)
        except RuntimeError as failure:
            reason = str(failure).splitlines()[0]
            raise CheckpointError(
                f"another of the {self.size} processes ended ({reason}): see its error message"
            ) from failure
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(outcomes):
            if message is not None:
                raise CheckpointError(f"process {rank} of {self.size}: {message}")
        return [outcome for outcome, _ in outcomes]

    def run_on_rank0[Result](self, work: Callable[[], Result]) -> Result:
        """Call a function in process 0 and return its result in every process. If it fails, all raise an error."""
        return self.all_gather(lambda: work() if self.first else None)[0]  # pyright: ignore[reportReturnType]

    def assign[Item](self, items: Sequence[Item], sizes: Sequence[int]) -> list[Item]:
        """Return this process's consecutive part of `items`. All parts have about the same total size."""
        total, ends = max(sum(sizes), 1), itertools.accumulate(sizes)
        middles = (end - size / 2 for end, size in zip(ends, sizes, strict=True))
        owners = (min(int(middle * self.size / total), self.size - 1) for middle in middles)
        return [item for item, owner in zip(items, owners, strict=True) if owner == self.rank]


class Progress:
    """Progress display on standard error: the number of bytes done, of a total. Thread-safe."""

    def __init__(self, label: str, total: int, *, shown: bool = True) -> None:
        self._label, self._total, self._done = label, total, 0
        self._shown, self._lock = shown, Lock()
        self._begun = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._shown and kind is None:
            self._show_line()

    @property
    def seconds(self) -> float:
        """Return the seconds since the progress was created."""
        return time.monotonic() - self._begun

    def count_blocks(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the given blocks, and count the bytes of each block as done after its use."""
        for block in blocks:
            count = len(block)
            yield block
            self.advance(count)

    def advance(self, count: int) -> None:
        """Count `count` more bytes as done, and print a line every few seconds."""
        with self._lock:
            self._done += count
            if self._shown and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
                self._last_line = time.monotonic()
                self._show_line()

    def _show_line(self) -> None:
        rate = self._done / max(self.seconds, 1e-9)
        left = (self._total - self._done) / max(rate, 1.0)
        percent = 100 * self._done / self._total if self._total else 100
        done, total, speed = map(in_bytes, (self._done, self._total, rate))
        text = f"{self._label}: {percent:3.0f} %, {done} of {total}, {speed}/s, {left:.0f} s left"
        show(text, error=True)


class Journal:
    """Journal file of one process, with a line for each byte range on disk. It is locked while the process lives."""

    def __init__(self, result: Path, rank: int = 0) -> None:
        """Open the journal file of a rank for the unfinished output folder `result`. Call `start_journal` first."""
        path = scratch_folder(result) / _LINES.replace("*", str(rank))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # ends an incomplete line of an earlier process

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def record(self, part: ByteRange, digest: str, written: int) -> None:
        """Flush the file descriptor `written` to disk, then write the byte range and its digest to the journal."""
        os.fdatasync(written)
        os.write(self._file, f"{_line_of(part)} {digest}\n".encode())
        os.fdatasync(self._file)


def start_journal(result: Path, plan_digest: str) -> None:
    """Begin a journal for the unfinished output folder `result`, unless there is a journal with this plan digest."""
    if read_plan_digest(result) == plan_digest:
        return
    scratch_folder(result).mkdir(exist_ok=True)
    with (scratch_folder(result) / _PLAN).open("w") as file:
        file.write(plan_digest)
        file.flush()
        os.fsync(file.fileno())


def read_plan_digest(result: Path) -> str:
    """Return the plan digest in the journal of the output folder `result`; an empty string if there is no journal."""
    try:
        return (scratch_folder(result) / _PLAN).read_text(errors="replace")
    except OSError:
        return ""


def has_live_writer(result: Path) -> bool:
    """Return True if a running process still writes to the output folder `result`: it keeps its journal file locked."""
    for path in scratch_folder(result).glob(_LINES):
        with path.open("rb+") as file:  # some network file systems cannot lock a file that is open for reading only
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def read_journal(result: Path, ranges: list[ByteRange]) -> dict[ByteRange, str]:
    """Return a dict from byte range to digest, for all `ranges` that the journal of the folder `result` lists."""
    digests: dict[str, str] = {}
    for path in scratch_folder(result).glob(_LINES):
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            name, _, digest = line.rpartition(" ")
            if line[-1] == "\n":
                digests[name] = digest[:-1]
    names = {part: _line_of(part) for part in ranges}
    return {part: digests[name] for part, name in names.items() if name in digests}


def _line_of(part: ByteRange) -> str:
    return f"{part.path} {part.offset} {part.end}"


def hash_range(part: ByteRange, progress: Progress) -> str | None:
    """Return the xxh3 digest of a byte range of a file; None if the range cannot be read completely."""
    digest, buffer, position = _new_digest(), memoryview(bytearray(1 << 20)), part.offset
    try:
        with part.path.open("rb", buffering=0) as file:
            file.seek(part.offset)
            while position < part.end:
                count = file.readinto(buffer[: part.end - position])
                if not count:
                    return None
                digest.update(buffer[:count])
                progress.advance(count)
                position += count
    except OSError:
        return None
    return digest.hexdigest()


def find_unchanged(folder: Path, recorded: Iterable[tuple[ByteRange, str]], progress: Progress) -> list[ByteRange]:
    """Return the byte ranges of the (range, digest) pairs in `recorded` that still have this digest in `folder`."""
    return [part for part, digest in recorded if hash_range(part._replace(path=folder / part.path), progress) == digest]


def write_ranges(
    folder: Path,
    files: Sequence[OutputFile],
    ranges: Iterable[ByteRange],
    source: TensorSource,
    journal: Journal,
    progress: Progress,
    threads: int,
) -> None:
    """Write byte ranges of files in a folder, and record each range in the journal when it is on disk.

    While one thread waits for the disk, another reads and transposes its range.
    """
    by_path = {Path(file.name): file for file in files}
    readers: SimpleQueue[SliceReader] = SimpleQueue()

    def write(part: ByteRange) -> None:
        reader = readers.get()
        try:
            _write_range(folder, by_path[part.path], part, reader, progress, journal)
        finally:
            readers.put(reader)

    with ExitStack() as stack, ThreadPoolExecutor(threads, "write") as pool:
        for _ in range(threads):
            readers.put(stack.enter_context(SliceReader(source)))
        try:
            deque(pool.map(write, ranges), maxlen=0)
        finally:  # if this thread ends early, such as by a signal, the others end after their current range
            pool.shutdown(cancel_futures=True)


def _write_range(
    folder: Path, output: OutputFile, part: ByteRange, reader: SliceReader, progress: Progress, journal: Journal
) -> None:
    handle = os.open(folder / part.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb", buffering=_BUFFER_BYTES) as file:
        file.seek(part.offset)
        digest = _new_digest()
        for content in output.contents_of(part):
            if isinstance(content, bytes):
                blocks: Iterable[memoryview] = [memoryview(content)]
            else:
                blocks = reader.read_blocks(content.slices.select(content.start, content.length), content.dtype)
            written = 0
            for block in progress.count_blocks(blocks):
                written += file.write(block)
                digest.update(block)
            if written != len(content):
                raise AssertionError(f"{output.name}: {written} bytes written of {len(content)}. Please report this")
        file.flush()
        journal.record(part, digest.hexdigest(), handle)


def check_sizes(folder: Path, files: Sequence[OutputFile]) -> None:
    """Raise CheckpointError if a file on disk does not have its planned size."""
    for output in files:
        path, size = folder / output.name, 0
        if path.is_file():
            with path.open("rb") as file:  # a network file system asks its server only when a file is opened
                size = os.fstat(file.fileno()).st_size
        if size != output.nbytes:
            raise CheckpointError(f"{path} has {size} bytes, expected {output.nbytes}: run the conversion again")
