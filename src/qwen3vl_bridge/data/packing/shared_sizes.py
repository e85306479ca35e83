"""Sizes that the processes of a machine measure for each other: each sample's once.

What lives here: the file that they share, and who of them measures what. What may not: measuring
(`data/processing/filtering.py`), rows that were packed before (`packed_rows.py`).

While packing goes along with reading, every process that plans rows wants the size of every sample: that of each rank,
of those too that share rows, and the data-loading processes of each. So they leave what they have measured in a file of
their job in the folder for temporary files, a record for each sample, behind one of how many were left out or cut. Who
measures a sample holds a lock meanwhile, which the kernel lifts if that process dies; the others measure other samples
of the window that they need, and wait at last for those that are being measured. Nothing here outlives the job, so that
each job says what it drops.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import secrets
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, get_args

from qwen3vl_bridge.data.packing.sample_sizes import AllSizes, Left, OwnNotes, Size, Sizes

import torch

logger = logging.getLogger(__name__)

# The fields of a size, and a checksum: records are read while others write them. What nobody wrote is all zeros, whose
# checksum is another.
_RECORD, _FIELDS = struct.Struct("<4q"), struct.Struct("<3q")
_PREFIX = "qwen3vl_sizes_"
# A byte behind all samples, locked by every process that has opened the file; and how old one is that is left over.
_IN_USE, _OLD = 1 << 62, 3600
_NOTES = _IN_USE + 1  # locked while the first record, of what was noted, is changed
_files: dict[Path, int] = {}  # opened by this process, and never closed: that would lift all its locks on a file


def sizes_of_job(total: int, rules: Mapping[str, Any]) -> Sizes:
    """Sizes for all processes of this job on this machine; for this process alone where no file can be shared.

    Args:
        total: samples.
        rules: what must be the same for a number to have the same size.
    """
    digest = hashlib.sha256(repr(sorted(rules.items())).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}_{_job()}_{digest}")
    try:
        _opened(path)
    except OSError as error:
        logger.warning("%s: %s; each process measures every sample by itself", path, error)
        return AllSizes(total)
    return SharedSizes(path)


def notes_of_job(rules: Mapping[str, Any], groups: Any = None) -> Callable[[Left], int]:
    """Counts the samples that are left out for all processes of this job on this machine, as `Sizes.note` does.

    For data that each data-parallel rank reads a part of. Tensor-, context- and pipeline-parallel ranks read the part
    of their data-parallel rank: the first of them counts, for the others the answer is 0.

    Args:
        rules: what is the same in processes that count together.
        groups: process groups, or None for a process that belongs to none.
    """
    first = groups is None or groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0
    return sizes_of_job(0, rules).note if first else _uncounted


def _uncounted(kind: Left) -> int:
    return 0


class SharedSizes(Sizes):
    """Of samples 0 to n - 1, in a file. Picklable, for workers."""

    def __init__(self, path: Path) -> None:
        """Share a file with whoever opens the same one."""
        self._path = path
        self._own: dict[int, Size] = {}  # what could not be written
        self._notes = OwnNotes()  # likewise

    def get(self, sample: int) -> Size | None:
        """As `Sizes` has it."""
        if sample in self._own:
            return self._own[sample]
        fields = self._read(1 + sample)
        return None if fields is None else Size(*fields)

    def _read(self, place: int) -> tuple[int, ...] | None:
        """The fields of a record; None for one that nobody wrote."""
        record = os.pread(_opened(self._path), _RECORD.size, place * _RECORD.size)
        if len(record) < _RECORD.size:
            return None
        *fields, checksum = _RECORD.unpack(record)
        return tuple(fields) if checksum == zlib.crc32(record[: _FIELDS.size]) else None

    def _write(self, place: int, fields: Sequence[int]) -> None:
        record = _RECORD.pack(*fields, zlib.crc32(_FIELDS.pack(*fields)))
        os.pwrite(_opened(self._path), record, place * _RECORD.size)

    def keep(self, sample: int, size: Size) -> None:
        """As `Sizes` has it."""
        try:
            self._write(1 + sample, size)
        except OSError as error:  # such as a full disk
            if not self._own:
                logger.warning("%s: %s; this process keeps what it measures to itself", self._path, error)
            self._own[sample] = size

    @contextlib.contextmanager
    def claim(self, sample: int, *, wait: bool) -> Iterator[bool]:
        """As `Sizes` has it. A lock is of a process: threads of one would share it."""
        file = _opened(self._path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, sample)
        except OSError as error:
            # Another process has it; or the file system knows no locks, and everyone measures.
            yield error.errno not in (errno.EACCES, errno.EAGAIN)
            return
        try:
            yield True
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, sample)

    def note(self, kind: Left) -> int:
        """As `Sizes` has it: those of this machine."""
        file = _opened(self._path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, _NOTES)
            try:
                noted = list(self._read(0) or (0,) * len(get_args(Left)))
                noted[get_args(Left).index(kind)] += 1
                self._write(0, noted)
                return noted[get_args(Left).index(kind)]
            finally:
                fcntl.lockf(file, fcntl.LOCK_UN, 1, _NOTES)
        except OSError:  # such as a full disk
            return self._notes.note(kind)


@functools.cache
def _job() -> str:
    """What no other job is called, the same in all processes that torch.distributed has joined and in their workers."""
    name = secrets.token_hex(8)
    if torch.distributed.is_initialized():
        store = torch.distributed.distributed_c10d._get_default_store()
        if store.add("qwen3vl_bridge/asked for the job's name", 1) == 1:
            store.set("qwen3vl_bridge/job", name)
        name = store.get("qwen3vl_bridge/job").decode()
    return name


def _opened(path: Path) -> int:
    if path not in _files:
        _remove_left_over(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            _files[path] = os.open(path, flags | os.O_EXCL, 0o600)
            # At the end of this process alone, also where it is no main process.
            Finalize(None, path.unlink, kwargs={"missing_ok": True}, exitpriority=0)
        except FileExistsError:
            _files[path] = os.open(path, flags, 0o600)
        fcntl.lockf(_files[path], fcntl.LOCK_SH, 1, _IN_USE)
    return _files[path]


def _remove_left_over(folder: Path) -> None:
    """Remove what jobs of this user have left that were killed."""
    for path in folder.glob(f"{_PREFIX}{os.getuid()}_*"):
        with contextlib.suppress(OSError):  # another process was faster, or is using it
            if path in _files or time.time() - path.stat().st_mtime < _OLD:
                continue
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _IN_USE)
                path.unlink()
            finally:
                os.close(file)
