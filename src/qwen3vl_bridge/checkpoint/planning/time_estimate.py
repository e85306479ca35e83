"""Estimates the time of a conversion, measured on samples of it."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.byte_streams import SegmentReader, cast
from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE, TensorSource
from qwen3vl_bridge.checkpoint.planning.plan import Plan, Task

# Bytes to read and write.
_SAMPLES, _SAMPLE_BYTES, _WRITTEN = 32, 16 << 20, 64 << 20


def estimate(plan: Plan, source: TensorSource, folder: Path, *, processes: int, passes: int = 0) -> float:
    """Estimated seconds of a conversion, assuming that source and disk continue at the speed of the samples.

    Processes are assumed to share reading and computing, and to write to the same disk. The samples differ in each
    call, so that the page cache of an earlier estimate is not mistaken for the speed of the disk.

    Args:
        plan: of the conversion.
        source: what the plan reads.
        folder: on the disk of the result. The file written there has no name and is removed afterwards.
        processes: number of processes that share the work.
        passes: number of additional reads of the source, or of a result as large: one for checksums, two to verify.
    """
    if not plan.nbytes:
        return 0.0
    tasks = random.sample(plan.tasks, min(_SAMPLES, len(plan.tasks)))
    reading = _reading(tasks, source)
    writing = _writing(folder, min(_WRITTEN, plan.nbytes))
    return plan.nbytes * ((1 + passes) * reading / processes + (reading if writing is None else writing))


def _reading(tasks: Sequence[Task], source: TensorSource) -> float:
    """Seconds per byte to read, cast and transpose."""
    cast(memoryview(bytearray(4)), "float32", "bfloat16", "")  # imports torch, which takes seconds, once
    sampled, begun = 0, time.monotonic()
    with SegmentReader(source) as reader:
        for task in tasks:
            length = min(task.segments.length, max(1, _SAMPLE_BYTES // ITEMSIZE[task.target.dtype]))
            sampled += sum(map(len, reader.blocks(task.segments.cut(0, length), task.target.dtype)))
    return (time.monotonic() - begun) / max(sampled, 1)


def _writing(folder: Path, nbytes: int) -> float | None:
    """Seconds per byte to reach the disk; None if nothing may be written."""
    block = memoryview(os.urandom(1 << 20))
    begun = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for start in range(0, nbytes, len(block)):
                file.write(block[: nbytes - start])
            os.fdatasync(file.fileno())
            return (time.monotonic() - begun) / nbytes
    except OSError:
        return None
