"""Reads segments of tensors as a stream of bytes, through one buffer of a fixed size.

A transposed matrix is in memory as a whole; it is that of one expert. All else passes through the buffer.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.slices import Segment, Segments, Slice, TransposedSlice, Zeros
from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE, TensorSource
from qwen3vl_bridge.io.errors import CheckpointError

import numpy as np

# Small enough to stay in a processor's cache between reading and writing.
_BLOCK = 1 << 18
_OPEN_FILES = 32
_SUM = "float32"
# Bytes of a matrix that are transposed at a time: more rows give longer contiguous writes.
_STRIP = 1 << 19


class SegmentReader:
    """Reads segments of one source. Not thread-safe."""

    def __init__(self, source: TensorSource, block: int = _BLOCK) -> None:
        self._source = source
        self._buffer = memoryview(bytearray(block))
        self._files: OrderedDict[Path, int] = OrderedDict()
        # The latest matrix is kept, because its parts are read one after the other: a gate, then its up projection.
        self._matrix: tuple[tuple[tuple[Slice, ...], int, str], mmap.mmap] | None = None

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def blocks(self, segments: Iterable[Segment], dtype: str) -> Iterator[memoryview]:
        """The bytes of a sequence of segments.

        Args:
            segments: the segments.
            dtype: dtype of the result; segments of another dtype are cast.

        Yields:
            Blocks; each is valid until the next is requested.

        Raises:
            CheckpointError: a file cannot be read, or ends early, or a value does not fit the dtype.
        """
        used, current, name = 0, dtype, ""
        for segment in segments:
            if used and (not isinstance(segment, Slice) or segment.plus):
                yield cast(self._buffer[:used], current, dtype, name)
                used = 0
            if isinstance(segment, Zeros):
                yield from self._zeros(segment.length * ITEMSIZE[dtype])
                continue
            if isinstance(segment, TransposedSlice):
                yield from self._turned(segment, dtype)
                continue
            if segment.plus:
                yield from self._shifted(segment, dtype)
                continue
            previous, name = name, segment.source
            found = self._source.specs[segment.source].dtype
            if found != current:
                if used:
                    yield cast(self._buffer[:used], current, dtype, previous)
                used, current = 0, found
            for path, offset, length in self._source.extents(segment):
                file = self._open(path, segment.source)
                while length:
                    take = min(length, len(self._buffer) - used)
                    self._read(file, self._buffer[used : used + take], offset, path, segment.source)
                    used, offset, length = used + take, offset + take, length - take
                    if used == len(self._buffer):
                        yield cast(self._buffer, current, dtype, name)
                        used = 0
        if used:
            yield cast(self._buffer[:used], current, dtype, name)

    def _zeros(self, length: int) -> Iterator[memoryview]:
        zeros = memoryview(bytes(min(length, len(self._buffer))))
        while length:
            yield zeros[:length]
            length -= min(length, len(zeros))

    def _shifted(self, segment: Slice, dtype: str) -> Iterator[memoryview]:
        """Add a number in float32, for all dtypes, and round once."""
        for block in self.blocks([segment._replace(plus=0)], _SUM):
            yield cast(
                memoryview(np.frombuffer(block, _SUM) + np.float32(segment.plus)).cast("B"), _SUM, dtype, segment.source
            )

    def _turned(self, segment: TransposedSlice, dtype: str) -> Iterator[memoryview]:
        dtypes = {self._source.specs[one.source].dtype for one in segment.slices}
        found = dtypes.pop() if len(dtypes) == 1 else dtype
        start, end = (number * ITEMSIZE[found] for number in (segment.start, segment.start + segment.length))
        matrix = self._transpose(segment, found)
        for position in range(start, end, len(self._buffer)):
            block = matrix[position : min(position + len(self._buffer), end)]
            yield cast(block, found, dtype, segment.slices[0].source)

    def _transpose(self, segment: TransposedSlice, dtype: str) -> memoryview:
        """The whole matrix of a segment, transposed, in a dtype."""
        key = (segment.slices, segment.columns, dtype)
        if self._matrix is None or self._matrix[0] != key:
            size, rows, columns = ITEMSIZE[dtype], segment.rows, segment.columns
            memory = self._memory(rows * columns * size)
            turned = np.frombuffer(memory, f"i{size}").reshape(columns, rows)
            segments, step = Segments(segment.slices), max(1, _STRIP // (columns * size))
            strip = np.empty((min(step, rows), columns), turned.dtype)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                self._fill(memoryview(strip[:count]).cast("B"), segments.cut(first * columns, count * columns), dtype)
                turned[:, first : first + count] = _transposed(strip[:count])
            self._matrix = (key, memory)
        return memoryview(self._matrix[1])

    def _memory(self, nbytes: int) -> mmap.mmap:
        """The previous matrix's memory again if it has the same size. Otherwise it is freed at once."""
        last, self._matrix = self._matrix, None
        if last is not None and len(last[1]) == nbytes:
            return last[1]
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _fill(self, into: memoryview, slices: Iterable[Segment], dtype: str) -> None:
        """Read runs of tensors, each in its dtype or cast to the requested one."""
        done = 0
        for one in slices:
            assert isinstance(one, Slice)
            if self._source.specs[one.source].dtype != dtype:
                for block in self.blocks([one], dtype):
                    into[done : done + len(block)] = block
                    done += len(block)
                continue
            for path, offset, length in self._source.extents(one):
                self._read(self._open(path, one.source), into[done : done + length], offset, path, one.source)
                done += length

    def _open(self, path: Path, name: str) -> int:
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path}, tensor {name}: {error.strerror}") from error
        self._files[path] = file
        return file

    def _read(self, file: int, into: memoryview, offset: int, path: Path, name: str) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(file, [into[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{path}, tensor {name}: {error.strerror} at byte {offset + done}") from error
            if not count:
                left = len(into) - done
                raise CheckpointError(
                    f"{path}, tensor {name}: ends at byte {offset + done}, expected {left} more bytes"
                )
            done += count


def _transposed(matrix: np.ndarray) -> np.ndarray:
    """The transpose, row-major: torch works tile by tile, numpy against the order of the memory."""
    import torch

    return torch.from_numpy(matrix).t().contiguous().numpy()


def cast(data: memoryview, source: str, target: str, name: str) -> memoryview:
    """Cast elements from one dtype to another, rounded to nearest even.

    Args:
        data: the elements.
        source: their dtype.
        target: the new dtype.
        name: name of their tensor, for the error.

    Raises:
        CheckpointError: a finite element is too large for the other dtype.
    """
    if source == target:
        return data
    import torch

    before = torch.frombuffer(data, dtype=getattr(torch, source), count=len(data) // ITEMSIZE[source])
    after = before.to(getattr(torch, target))
    if ITEMSIZE[target] <= ITEMSIZE[source]:
        overflown = after.isinf() & before.isfinite()
        if overflown.any():
            raise CheckpointError(f"{name}: value {before[overflown][0].item():g} is too large for {target}")
    return memoryview(after.view(torch.uint8).numpy())
