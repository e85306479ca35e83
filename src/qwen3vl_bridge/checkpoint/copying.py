"""Writes the units of files that were laid out.

What lives here: from segments to bytes on disk. What may not: what the files are, who writes which units.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.files import OutputFile, Unit
from qwen3vl_bridge.checkpoint.journal import Journal, new_digest
from qwen3vl_bridge.checkpoint.progress import Progress
from qwen3vl_bridge.checkpoint.streams import PieceReader
from qwen3vl_bridge.checkpoint.tensors import TensorSource

# Files that wait for the disk while the next one is written. More would help no disk, and each of them stays open.
_WAITING = 2
# Smaller than the blocks that come in, so that those go to the file without another copy.
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
) -> None:
    """Write units and note in the journal those that are on disk.

    Args:
        folder: where the files go.
        files: the files.
        work: what to write of them.
        source: where tensor data comes from.
        journal: this process's.
        meter: is told of every block.
        sync: whether to wait until the bytes have reached the disk before they are noted, and until all have.

    Raises:
        CheckpointError: the source cannot be read, or a value does not fit its dtype.
        OSError: the disk is full, or refuses otherwise.
    """
    with PieceReader(source) as reader, ThreadPoolExecutor(1, "sync") as thread:
        pending: deque[Future[None]] = deque()
        for unit in work:
            file = _open_at(folder / files[unit.file].name, unit)
            try:
                digest = _write(file, files[unit.file], unit, reader, meter)
                file.flush()
            except BaseException:
                with contextlib.suppress(OSError):  # such as a full disk, which is the exception already
                    file.close()
                raise
            # The disk is waited for in a thread, while the next unit is read and written.
            pending.append(thread.submit(_commit, file, files[unit.file], unit, digest, journal, sync))
            while len(pending) > _WAITING or (pending and pending[0].done()):
                pending.popleft().result()
        for future in pending:
            future.result()


def _write(file: BinaryIO, output: OutputFile, unit: Unit, reader: PieceReader, meter: Progress) -> str:
    """Write a unit; returns the digest of its bytes."""
    digest = new_digest()
    for segment in output.segments_of(unit):
        if isinstance(segment, bytes):
            file.write(segment)
            digest.update(segment)
            meter.advance(len(segment))
            continue
        pieces, written = segment.pieces.cut(segment.start, segment.length), 0
        for block in meter.counted(reader.blocks(pieces, segment.dtype)):
            written += file.write(block)
            digest.update(block)
        if written != len(segment):
            raise AssertionError(f"{output.name}: {written} bytes written of {len(segment)}")
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
    """Have the file system find room at once: faster than block by block, and a full disk shows before the work."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(file, 0, ctypes.c_int64(start), ctypes.c_int64(nbytes)) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        raise OSError(number, os.strerror(number))


def check_sizes(folder: Path, files: Sequence[OutputFile]) -> None:
    """Check that files are as long as they were to be.

    Raises:
        CheckpointError: one is not.
    """
    for file in files:
        path = folder / file.name
        size = path.stat().st_size if path.is_file() else 0
        if size != file.nbytes:
            raise CheckpointError(f"{path} has {size} bytes, expected {file.nbytes}")
