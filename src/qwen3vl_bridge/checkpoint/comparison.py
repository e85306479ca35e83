"""Compares two sources tensor by tensor, streaming, and computes checksums the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from qwen3vl_bridge.checkpoint.conversion_plan import Task
from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, SegmentReader, Slice, TensorSource
from qwen3vl_bridge.checkpoint.processes import Progress

import numpy as np


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between both sides.

    Attributes:
        name: its name; for a Megatron checkpoint and a Hugging Face model, the latter's.
        elements: number of elements that differ; None if only checksums were compared.
        first: index of the first one that differs, row-major.
        numel: number of its elements.
    """

    name: str
    elements: int | None
    first: int | None
    numel: int

    def __str__(self) -> str:
        if self.elements is None:
            return f"{self.name}: its {self.numel} elements have another checksum"
        return f"{self.name}: {self.elements} of {self.numel} elements differ, the first is number {self.first}"


def differences(
    tasks: Iterable[Task], source: TensorSource, target: TensorSource, meter: Progress
) -> Iterator[Difference]:
    """The target tensors that differ from the results of some tasks.

    Args:
        tasks: the tasks; a target that is stored in another dtype than the task's is cast to it.
        source: source of the tasks.
        target: what is compared with the results.
        meter: receives every block.
    """
    with SegmentReader(source) as ours, SegmentReader(target) as theirs:
        for task in tasks:
            name, dtype, numel = task.target.name, task.target.dtype, task.target.numel
            one = ours.blocks(task.segments, dtype)
            other = meter.counted(theirs.blocks([Slice(name, 0, numel)], dtype))
            found = difference(name, numel, dtype, one, other)
            if found is not None:
                yield found


def checksums(names: Iterable[str], source: TensorSource, meter: Progress) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, row-major, little-endian, as stored.

    Args:
        names: which tensors.
        source: where they are.
        meter: receives every block.
    """
    found = {}
    with SegmentReader(source) as reader:
        for name in names:
            spec, digest = source.specs[name], hashlib.sha256()
            for block in meter.counted(reader.blocks([Slice(name, 0, spec.numel)], spec.dtype)):
                digest.update(block)
            found[name] = digest.hexdigest()
    return found


def _paired(one: Iterator[memoryview], other: Iterator[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Two streams of the same length as segments of the same length."""
    left, right = next(one, None), next(other, None)
    while left is not None and right is not None:
        count = min(len(left), len(right))
        yield left[:count], right[:count]
        left = left[count:] if len(left) > count else next(one, None)
        right = right[count:] if len(right) > count else next(other, None)
    if left is not None or right is not None:
        raise AssertionError("streams of different lengths")


def difference(
    name: str, numel: int, dtype: str, one: Iterator[memoryview], other: Iterator[memoryview]
) -> Difference | None:
    """Where two streams of a tensor differ.

    Args:
        name: the tensor.
        numel: its number of elements.
        dtype: dtype of both streams.
        one: its bytes.
        other: its bytes.

    Returns:
        The difference, None if there is none.
    """
    size = ITEMSIZE[dtype]
    position, count, first = 0, 0, -1
    for left, right in _paired(one, other):
        unequal = np.frombuffer(left, f"u{size}") != np.frombuffer(right, f"u{size}")
        here = int(np.count_nonzero(unequal))
        if here and not count:
            first = position + int(np.argmax(unequal))
        count += here
        position += len(unequal)
    return Difference(name, count, first, numel) if count else None
