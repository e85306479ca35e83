"""Sizes of samples: of one process, or shared by the processes of a machine, so that each sample is measured once.

When packing during training, every process that plans rows needs the size of every sample: each rank, including those
that share rows, and the data-loading processes of each. So they write their measurements to a file of their job in the
folder for temporary files, with a record for each sample, after a record of the numbers of dropped and truncated ones.
A process that measures a sample holds a lock, which the kernel releases if the process dies; the others measure other
samples of the window that they need, and finally wait for those that are being measured. Nothing is kept after the job,
so each job logs what it drops.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

logger = logging.getLogger(__name__)

# What may happen to a sample: dropped, truncated, or found to be unreadable when its row was due.
Left = Literal["dropped", "cut", "unreadable"]

# The fields of a size, and a checksum: records are read while others write them. A record that was not written is all
# zeros, whose checksum differs.
_RECORD, _FIELDS = struct.Struct("<4q"), struct.Struct("<3q")
_PREFIX = "qwen3vl_sizes_"
# A byte after all samples, locked by every process that has opened the file; and the age of files that are left over.
_IN_USE, _OLD = 1 << 62, 3600
_NOTES = _IN_USE + 1  # locked while the first record, of the counts, is changed
_files: dict[Path, int] = {}  # opened by this process, and never closed: that would release all its locks on a file


class Size(NamedTuple):
    """Space that a sample takes in a row. Without tokens it is in no row."""

    tokens: int
    patches: int
    patch_pairs: int  # sum over frames of the squared number of patches, the cost of the vision tower's attention

    def padded(self, multiple: int) -> Size:
        """The size with tokens padded to a multiple."""
        return self._replace(tokens=-(-self.tokens // multiple) * multiple)


NOTHING = Size(0, 0, 0)


class Sizes:
    """Sizes of the `most` recently measured samples, by their numbers, in this process."""

    def __init__(self, most: int = 2**16) -> None:
        self._most, self._kept, self._noted = most, dict[int, Size](), Counter[Left]()

    def get(self, sample: int) -> Size | None:
        """A sample's size, None if it has not been measured."""
        return self._kept.get(sample)

    def keep(self, sample: int, size: Size) -> None:
        """Store a measured size."""
        self._kept[sample] = size
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]

    def claim(self, sample: int, *, wait: bool) -> AbstractContextManager[bool]:
        """Lock a sample while it is measured, so that no other process measures it too.

        The context's value is whether this process holds the lock. With `wait` it waits for another process that does,
        which then has measured the sample, or has died.
        """
        return nullcontext(True)

    def note(self, kind: Left) -> int:
        """Count a sample that is dropped or truncated: their number so far, over the processes that share sizes."""
        self._noted[kind] += 1
        return self._noted[kind]


def sizes_of_job(total: int, rules: Mapping[str, Any]) -> Sizes:
    """Sizes for all processes of this job on this machine; only for this process if no file can be shared.

    `rules` are whatever must be equal for a sample's number to have the same size.
    """
    digest = hashlib.sha256(repr(sorted(rules.items())).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}_{_job()}_{digest}")
    try:
        _opened(path)
    except OSError as error:
        logger.warning("%s: %s; each process measures every sample by itself", path, error)
        return Sizes(total)
    return SharedSizes(path)


def notes_of_job(rules: Mapping[str, Any], groups: Any = None) -> Callable[[Left], int]:
    """Counts the samples that are left out for all processes of this job on this machine, as `Sizes.note` does.

    For data that each data-parallel rank reads a part of. Tensor-, context- and pipeline-parallel ranks read the part
    of their data-parallel rank: the first of them counts, for the others the count is 0. `rules` are what is the same
    in processes that count together; `groups` are None for a process that belongs to none.
    """
    first = groups is None or groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0
    return sizes_of_job(0, rules).note if first else _uncounted


def _uncounted(kind: Left) -> int:
    return 0


class SharedSizes(Sizes):
    """Sizes of samples 0 to n - 1, in a file of all processes that open the same one. Picklable, for workers."""

    def __init__(self, path: Path) -> None:
        super().__init__()  # for sizes that cannot be written
        self._path = path

    def get(self, sample: int) -> Size | None:
        """See `Sizes`."""
        fields = self._read(1 + sample)
        return super().get(sample) if fields is None else Size(*fields)

    def _read(self, index: int) -> tuple[int, ...] | None:
        """The fields of a record; None for one that was not written."""
        record = os.pread(_opened(self._path), _RECORD.size, index * _RECORD.size)
        if len(record) < _RECORD.size:
            return None
        *fields, checksum = _RECORD.unpack(record)
        return tuple(fields) if checksum == zlib.crc32(record[: _FIELDS.size]) else None

    def _write(self, index: int, fields: Sequence[int]) -> None:
        record = _RECORD.pack(*fields, zlib.crc32(_FIELDS.pack(*fields)))
        os.pwrite(_opened(self._path), record, index * _RECORD.size)

    def keep(self, sample: int, size: Size) -> None:
        """See `Sizes`."""
        try:
            self._write(1 + sample, size)
        except OSError as error:  # such as a full disk
            if not self._kept:
                logger.warning("%s: %s; this process keeps what it measures to itself", self._path, error)
            super().keep(sample, size)

    @contextlib.contextmanager
    def claim(self, sample: int, *, wait: bool) -> Iterator[bool]:
        """See `Sizes`. A lock belongs to a process: threads of one would share it."""
        file = _opened(self._path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, sample)
        except OSError as error:
            # Another process has the lock; or the file system has no locks, and every process measures.
            yield error.errno not in (errno.EACCES, errno.EAGAIN)
            return
        try:
            yield True
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, sample)

    def note(self, kind: Left) -> int:
        """See `Sizes`: counts of this machine."""
        place = get_args(Left).index(kind)
        try:
            with self.claim(_NOTES, wait=True):
                noted = list(self._read(0) or (0,) * len(get_args(Left)))
                noted[place] += 1
                self._write(0, noted)
                return noted[place]
        except OSError:  # such as a full disk
            return super().note(kind)


@functools.cache
def _job() -> str:
    """A name that is unique to the job, and equal in all processes joined by torch.distributed and in their workers."""
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
            # Only at the end of this process, also if it is not a main process.
            Finalize(None, path.unlink, kwargs={"missing_ok": True}, exitpriority=0)
        except FileExistsError:
            _files[path] = os.open(path, flags, 0o600)
        fcntl.lockf(_files[path], fcntl.LOCK_SH, 1, _IN_USE)
    return _files[path]


def _remove_left_over(folder: Path) -> None:
    """Remove files of this user's jobs that were killed."""
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
