"""How long a conversion may take, measured on samples of it.

What lives here: reading some of the source, writing next to the target, and the extrapolation. What may not: doing any
of it for good.
"""

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

# How much is read and written.
_SAMPLES, _SAMPLE_BYTES, _WRITTEN = 32, 16 << 20, 64 << 20


def estimate(plan: Plan, source: TensorSource, folder: Path, *, processes: int, passes: int = 0) -> float:
    """Seconds that a conversion may take, if source and disk go on as they do on samples.

    Processes are taken to share what is read and computed, and to write to the same disk. The samples are others every
    time, so that what an earlier estimate has left in the page cache is not taken for the speed of the disk.

    Args:
        plan: of the conversion.
        source: what the plan reads.
        folder: on the disk that the result goes to. What is written there has no name and is gone afterwards.
        processes: how many share the work.
        passes: how often the source, or a result as large, is read besides: once for checksums, twice to verify.
    """
    if not plan.nbytes:
        return 0.0
    tasks = random.sample(plan.tasks, min(_SAMPLES, len(plan.tasks)))
    reading = _reading(tasks, source)
    writing = _writing(folder, min(_WRITTEN, plan.nbytes))
    return plan.nbytes * ((1 + passes) * reading / processes + (reading if writing is None else writing))


def _reading(tasks: Sequence[Task], source: TensorSource) -> float:
    """Seconds a byte takes to be read, cast and turned."""
    cast(memoryview(bytearray(4)), "float32", "bfloat16", "")  # imports torch, which takes seconds, once
    sampled, begun = 0, time.monotonic()
    with SegmentReader(source) as reader:
        for task in tasks:
            length = min(task.segments.length, max(1, _SAMPLE_BYTES // ITEMSIZE[task.target.dtype]))
            sampled += sum(map(len, reader.blocks(task.segments.cut(0, length), task.target.dtype)))
    return (time.monotonic() - begun) / max(sampled, 1)


def _writing(folder: Path, nbytes: int) -> float | None:
    """Seconds a byte takes to reach the disk; None where nothing may be written."""
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
