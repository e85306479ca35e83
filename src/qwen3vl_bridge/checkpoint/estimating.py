"""How long a conversion may take, measured on samples of it.

What lives here: converting some of it into files without a name beside the target, reading some of it, and what
follows. What may not: doing any of it for good.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from qwen3vl_bridge.checkpoint.journal import new_digest
from qwen3vl_bridge.checkpoint.pieces import Pieces
from qwen3vl_bridge.checkpoint.plan import Plan, Task
from qwen3vl_bridge.checkpoint.streams import PieceReader, cast
from qwen3vl_bridge.checkpoint.tensors import ITEMSIZE, TensorSource

# How large a sample is, how many are converted at most, how many are only read, and which part of the whole they are.
_BYTES, _CONVERTED, _READ, _SHARE = 16 << 20, 24, 8, 4
# How much is written to measure the disk alone.
_WRITTEN = 64 << 20
# How many threads of a conversion read and write at a time.
_THREADS = 2
_spent = 0.0


class _Sample:
    """Some elements of a tensor to be."""

    def __init__(self, task: Task) -> None:
        """Choose them anywhere in it."""
        self.dtype = task.target.dtype
        size, whole = ITEMSIZE[self.dtype], task.pieces.length
        length = min(whole, max(1, _BYTES // size))
        self.pieces = Pieces(task.pieces.cut(random.randint(0, whole - length), length))
        self.nbytes = length * size


def estimate(plan: Plan, source: TensorSource, folder: Path, *, processes: int, passes: int = 0) -> float:
    """Seconds that a conversion may take once it is planned, if source and disk go on as they do on samples.

    Samples are read, cast or turned, hashed, written and waited for as by the conversion. They are others every time,
    so that what an earlier estimate has left in the page cache is not taken for the speed of the disk. What is read
    again is taken to be in the page cache where the memory has room for source and result, and else to be read as at
    first. Processes are taken to share what is read and computed, and to write to the same disk.

    Args:
        plan: of the conversion.
        source: what the plan reads.
        folder: on the disk that the result goes to. What is written there has no name and is gone afterwards.
        processes: how many share the work.
        passes: how often the source, or a result as large, is read besides: once for checksums, twice to verify.
    """
    global _spent
    if not plan.nbytes:
        return 0.0
    begun = time.monotonic()
    loading = _load()
    count = min(_CONVERTED, max(1, plan.nbytes // _SHARE // _BYTES))
    sizes = [task.target.nbytes for task in plan.tasks]
    samples = [_Sample(task) for task in random.choices(plan.tasks, sizes, k=count + min(_READ, count))]
    converted, read = samples[:count], samples[count:]
    first = _reading(read, source)
    converting = _converting(converted, source, folder)
    again = _reading(read, source) if 2 * plan.nbytes < _free_memory() else first
    disk = _writing(converted, folder) if processes > 1 else 0.0
    seconds = max(converting / processes, disk)
    seconds += (passes * again + (passes % 2) * _checksum()) / processes
    _spent += time.monotonic() - begun
    return loading + plan.nbytes * seconds


def spent() -> float:
    """Seconds that this process has spent on samples, which a conversion does not."""
    return _spent


def _load() -> float:
    """Seconds that it takes to import torch, which every conversion does: here, unless it is there already."""
    begun = time.monotonic()
    there = "torch" in sys.modules
    cast(memoryview(bytearray(4)), "float32", "bfloat16", "")
    return 0.0 if there else time.monotonic() - begun


def _reading(samples: Sequence[_Sample], source: TensorSource) -> float:
    """Seconds a byte takes to be read, cast and turned."""
    begun = time.monotonic()
    with PieceReader(source) as reader:
        for sample in samples:
            for _ in reader.blocks(sample.pieces, sample.dtype):
                pass
    return (time.monotonic() - begun) / _nbytes(samples)


def _converting(samples: Sequence[_Sample], source: TensorSource, folder: Path | None) -> float:
    """Seconds a byte takes from the source to the disk; where nothing may be written, to where it would be written."""

    def convert(mine: Sequence[_Sample]) -> None:
        with PieceReader(source) as reader, _unnamed(folder) as file:
            digest = new_digest()
            for sample in mine:
                for block in reader.blocks(sample.pieces, sample.dtype):
                    digest.update(block)
                    file.write(block)
            file.flush()
            if folder is not None:
                os.fdatasync(file.fileno())

    begun = time.monotonic()
    try:
        with ThreadPoolExecutor(_THREADS, "sample") as pool:
            list(pool.map(convert, [samples[i::_THREADS] for i in range(_THREADS)]))
    except OSError:
        if folder is None:
            raise
        return _converting(samples, source, None)
    return (time.monotonic() - begun) / _nbytes(samples)


def _writing(samples: Sequence[_Sample], folder: Path) -> float:
    """Seconds a byte takes to reach the disk, which processes share; none where nothing may be written."""
    block, nbytes = memoryview(os.urandom(1 << 20)), min(_WRITTEN, _nbytes(samples))
    begun = time.monotonic()
    try:
        with _unnamed(folder) as file:
            for start in range(0, nbytes, len(block)):
                file.write(block[: nbytes - start])
            os.fdatasync(file.fileno())
            return (time.monotonic() - begun) / nbytes
    except OSError:
        return 0.0


def _checksum() -> float:
    """Seconds a byte takes to become part of a checksum."""
    block, begun = bytes(1 << 22), time.monotonic()
    hashlib.sha256(block)
    return (time.monotonic() - begun) / len(block)


def _unnamed(folder: Path | None) -> BinaryIO:
    if folder is None:
        return open(os.devnull, "wb", buffering=0)
    return tempfile.TemporaryFile(dir=folder, buffering=0)  # pyright: ignore[reportReturnType]


def _nbytes(samples: Sequence[_Sample]) -> int:
    return sum(sample.nbytes for sample in samples)


def _free_memory() -> int:
    """Bytes that the page cache may take; none where that cannot be told."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return 0
