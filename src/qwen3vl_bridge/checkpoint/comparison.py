"""Compares two sources tensor by tensor, streaming, and computes checksums the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from qwen3vl_bridge.checkpoint.conversion_plan import Task
from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, SegmentReader, TensorSource
from qwen3vl_bridge.checkpoint.processes import Progress


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between both sides."""

    name: str  # for a Megatron checkpoint and a Hugging Face model, the latter's
    elements: int | None  # that differ; None if only checksums were compared
    first: int | None  # index of the first one that differs, row-major
    numel: int

    def __str__(self) -> str:
        if self.elements is None:
            return f"{self.name}: its {self.numel} elements have another checksum"
        return f"{self.name}: {self.elements} of {self.numel} elements differ, the first is number {self.first}"


def differences(
    tasks: Iterable[Task], source: TensorSource, target: TensorSource, meter: Progress
) -> Iterator[Difference]:
    """The target tensors that differ from the results of some tasks; those of another dtype are cast to the task's."""
    with SegmentReader(source) as ours, SegmentReader(target) as theirs:
        for task in tasks:
            name, dtype, numel = task.target.name, task.target.dtype, task.target.numel
            stored = meter.counted(theirs.tensor(name, dtype))
            found = difference(name, numel, dtype, ours.blocks(task.segments, dtype), stored)
            if found is not None:
                yield found


def checksums(names: Iterable[str], source: TensorSource, meter: Progress) -> dict[str, str]:
    """SHA-256 of the bytes of each of some tensors, row-major, little-endian, as stored."""
    found = {}
    with SegmentReader(source) as reader:
        for name in names:
            digest = hashlib.sha256()
            for block in meter.counted(reader.tensor(name)):
                digest.update(block)
            found[name] = digest.hexdigest()
    return found


def difference(
    name: str, numel: int, dtype: str, left: Iterator[memoryview], right: Iterator[memoryview]
) -> Difference | None:
    """Where two streams of a tensor's bytes, both in `dtype`, differ; None if they do not."""
    import numpy as np

    size = ITEMSIZE[dtype]
    position, count, first = 0, 0, -1
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        length = min(len(a), len(b))
        unequal = np.frombuffer(a[:length], f"u{size}") != np.frombuffer(b[:length], f"u{size}")
        here = int(np.count_nonzero(unequal))
        if here and not count:
            first = position + int(np.argmax(unequal))
        count += here
        position += len(unequal)
        a = a[length:] if len(a) > length else next(left, None)
        b = b[length:] if len(b) > length else next(right, None)
    if a is not None or b is not None:
        raise AssertionError("streams of different lengths")
    return Difference(name, count, first, numel) if count else None
