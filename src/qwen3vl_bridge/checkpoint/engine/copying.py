"""Writes the units of files that were laid out."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from typing import BinaryIO

from qwen3vl_bridge.checkpoint.engine.journal import Journal, new_digest
from qwen3vl_bridge.checkpoint.engine.progress import Progress
from qwen3vl_bridge.checkpoint.formats.byte_streams import SegmentReader
from qwen3vl_bridge.checkpoint.formats.planned_files import OutputFile, Unit
from qwen3vl_bridge.checkpoint.formats.tensor_specs import TensorSource
from qwen3vl_bridge.io.errors import CheckpointError

# Smaller than the incoming blocks, so that those go to the file without another copy.
_BUFFER = 1 << 16


def write_units(
    folder: Path,
    files: Sequence[OutputFile],
    work: Iterable[Unit],
    source: TensorSource,
    journal: Journal,
    meter: Progress,
    *,
    sync: bool = True,
    threads: int = 1,
) -> None:
    """Write units and note in the journal those that are on disk.

    Args:
        folder: folder of the files.
        files: the files.
        work: the units to write.
        source: source of tensor data.
        journal: this process's.
        meter: receives every block.
        sync: whether to wait until the bytes are on disk before they are noted, and until all are.
        threads: number of units that are written at a time; while one waits for the disk, another is read and
            transposed.

    Raises:
        CheckpointError: the source cannot be read, or a value does not fit its dtype.
        OSError: the disk is full, or refuses otherwise.
    """
    left, lock, stop = iter(work), Lock(), Event()

    def take() -> Unit | None:
        with lock:
            return None if stop.is_set() else next(left, None)

    def write_some() -> None:
        with SegmentReader(source) as reader:
            while (unit := take()) is not None:
                try:
                    _write_unit(folder, files[unit.file], unit, reader, meter, journal, sync)
                except BaseException:
                    stop.set()
                    raise

    with ThreadPoolExecutor(threads, "write") as pool:
        try:
            for writing in [pool.submit(write_some) for _ in range(threads)]:
                writing.result()
        finally:
            stop.set()  # whatever ends this thread, such as a signal, ends the others after their unit


def _write_unit(
    folder: Path, output: OutputFile, unit: Unit, reader: SegmentReader, meter: Progress, journal: Journal, sync: bool
) -> None:
    file = _open_at(folder / output.name, unit)
    try:
        digest = _write(file, output, unit, reader, meter)
        file.flush()
    except BaseException:
        with contextlib.suppress(OSError):  # such as a full disk, which is the exception already
            file.close()
        raise
    _commit(file, output, unit, digest, journal, sync)


def _write(file: BinaryIO, output: OutputFile, unit: Unit, reader: SegmentReader, meter: Progress) -> str:
    """Write a unit; returns the digest of its bytes."""
    digest = new_digest()
    for content in output.contents_of(unit):
        if isinstance(content, bytes):
            file.write(content)
            digest.update(content)
            meter.advance(len(content))
            continue
        segments, written = content.segments.cut(content.start, content.length), 0
        for block in meter.counted(reader.blocks(segments, content.dtype)):
            written += file.write(block)
            digest.update(block)
        if written != len(content):
            raise AssertionError(f"{output.name}: {written} bytes written of {len(content)}")
    return digest.hexdigest()


def _commit(file: BinaryIO, output: OutputFile, unit: Unit, digest: str, journal: Journal, sync: bool) -> None:
    with file:
        if sync:
            os.fdatasync(file.fileno())
        journal.note(output, unit, digest, sync=sync)


def _open_at(path: Path, unit: Unit) -> BinaryIO:
    """A file, open where a unit begins, with room for it on the disk."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb", buffering=_BUFFER)
    try:
        _reserve(file.fileno(), unit.start, unit.nbytes)
        file.seek(unit.start)
    except BaseException:
        file.close()
        raise
    return file


def _reserve(file: int, start: int, nbytes: int) -> None:
    """Reserve the space at once: faster than block by block, and a full disk is detected before the work."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(file, 0, ctypes.c_int64(start), ctypes.c_int64(nbytes)) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        raise OSError(number, os.strerror(number))


def check_sizes(folder: Path, files: Sequence[OutputFile]) -> None:
    """Check that files have their planned sizes.

    Raises:
        CheckpointError: one does not.
    """
    for file in files:
        path = folder / file.name
        size = _size(path)
        if size != file.nbytes:
            raise CheckpointError(f"{path} has {size} bytes, expected {file.nbytes}")


def _size(path: Path) -> int:
    """Length of a file, 0 if it does not exist. Opened, because only then a network file system asks its server."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size
