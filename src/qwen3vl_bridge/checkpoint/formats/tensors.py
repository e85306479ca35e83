"""Tensors on disk: dtypes and descriptions, ranges of their elements, and the bytes of such ranges as a stream.

Streams pass through one buffer of a fixed size. Only a matrix that is transposed is in memory as a whole: one expert's.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.weights import fp8

if TYPE_CHECKING:
    from torch import Tensor

# torch name -> (name in a safetensors header, bytes per element)
_DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "float8_e8m0fnu": ("F8_E8M0", 1),
    "complex64": ("C64", 8), "bool": ("BOOL", 1),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
}  # fmt: skip
DTYPE_OF_SAFETENSORS = {code: name for name, (code, _) in _DTYPES.items()}
SAFETENSORS_OF_DTYPE = {name: code for name, (code, _) in _DTYPES.items()}
ITEMSIZE = {name: size for name, (_, size) in _DTYPES.items()}
# Allowed dtypes of stored weights and of casts.
WEIGHT_DTYPES = ("float32", "float16", "bfloat16")

# Small enough to stay in a processor's cache between reading and writing.
_BLOCK = 1 << 18
_OPEN_FILES = 32
_SUM = "float32"
# Bytes of a matrix that are transposed at a time: more rows give longer contiguous writes.
_STRIP = 1 << 19

Shape = tuple[int, ...]


class Extent(NamedTuple):
    """A range of bytes of a file."""

    path: Path
    offset: int
    length: int


class BlockScales(NamedTuple):
    """Where the scales of a tensor in FP8 are."""

    stored: Extent
    dtype: str
    block: fp8.Block


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch's name) and shape of a tensor, contiguous and row-major.

    One with `scales` is stored in FP8; the dtype is the one in which it is read unless another is requested.
    """

    name: str
    dtype: str
    shape: Shape
    scales: BlockScales | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * ITEMSIZE[self.dtype]

    def describe(self) -> str:
        """Shape and dtype as text."""
        return f"{list(self.shape)} {self.dtype}"


def main_dtype(specs: Iterable[TensorSpec]) -> str:
    """The dtype of most elements: that of a model which has others in addition."""
    counts: Counter[str] = Counter()
    for spec in specs:
        counts[spec.dtype] += spec.numel
    return counts.most_common(1)[0][0]


class Slice(NamedTuple):
    """Consecutive elements of a source tensor, in row-major order; `plus` is added to each."""

    source: str
    start: int
    length: int
    plus: int = 0

    def part(self, start: int, length: int) -> Slice:
        """Some of its elements, as a segment."""
        return Slice(self.source, self.start + start, length, self.plus)


class TransposedSlice(NamedTuple):
    """Elements [start, start + length) of a transposed matrix.

    The matrix has `columns` columns, and its elements are those of `slices`, one slice after the other.
    """

    slices: tuple[Slice, ...]
    columns: int
    start: int
    length: int

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return sum(piece.length for piece in self.slices)

    @property
    def rows(self) -> int:
        """Rows of the matrix: columns of the transposed one."""
        return self.numel // self.columns

    def part(self, start: int, length: int) -> TransposedSlice:
        """Some of its elements, as a segment."""
        return self._replace(start=self.start + start, length=length)


class Zeros(NamedTuple):
    """Elements without a source, such as rows that pad a vocabulary."""

    length: int

    def part(self, start: int, length: int) -> Zeros:
        """Some of its elements, as a segment."""
        del start
        return Zeros(length)


class Quantized(NamedTuple):
    """Elements [start, start + length) of matrices in FP8, or of their scales.

    The matrices, [..., rows, columns], have the elements of `pieces`, one after the other.
    """

    pieces: tuple[Segment, ...]
    shape: Shape  # of the matrices
    block: fp8.Block
    scales_in: str
    kept: Extent | None  # scales that blocks have again if their values are unchanged
    of_scales: bool
    start: int
    length: int

    def part(self, start: int, length: int) -> Quantized:
        """Some of its elements, as a segment."""
        return self._replace(start=self.start + start, length=length)


Segment = Slice | TransposedSlice | Zeros | Quantized


class Segments:
    """Consecutive segments, which can be cut anywhere at little cost."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._pieces = tuple(segments)

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((segment.length for segment in self._pieces), initial=0))

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def length(self) -> int:
        """Number of elements."""
        return self._starts[-1]

    def cut(self, start: int, length: int) -> Iterator[Segment]:
        """Elements [start, start + length) as segments; AssertionError if there are fewer."""
        end = start + length
        if end > self.length:
            raise AssertionError(f"elements up to {end} of {self.length}")
        at = bisect_right(self._starts, start) - 1
        while start < end:
            segment, first = self._pieces[at], self._starts[at]
            take = min(end, first + segment.length) - start
            if take:
                yield segment if take == segment.length else segment.part(start - first, take)
            start, at = start + take, at + 1


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same elements in fewer segments: adjacent slices of a tensor as one."""
    last: Segment | None = None
    for segment in segments:
        if (
            isinstance(last, Slice)
            and isinstance(segment, Slice)
            and (last.source, last.start + last.length, last.plus) == (segment.source, segment.start, segment.plus)
        ):
            last = last._replace(length=last.length + segment.length)
            continue
        if last is not None:
            yield last
        last = segment
    if last is not None:
        yield last


class TensorSource(Protocol):
    """Tensors somewhere on disk."""

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every tensor by name; one that is removed from it is no longer a part of the source."""
        ...

    @property
    def files(self) -> Iterable[Path]:
        """The files that contain the tensors."""
        ...

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """Byte ranges of the elements of a slice, in order."""
        ...


class SegmentReader:
    """Reads segments of one source. Not thread-safe."""

    def __init__(self, source: TensorSource, block: int = _BLOCK) -> None:
        self._source = source
        self._buffer = memoryview(bytearray(block))
        self._files: OrderedDict[Path, int] = OrderedDict()
        # The scales of the latest tensor that has some, in float32, and the largest value that it may have.
        self._scales: tuple[BlockScales, Any, float] | None = None
        # The latest matrix is kept, because its parts are read one after the other: a gate, then its up projection.
        self._matrix: tuple[tuple[tuple[Slice, ...], int, str], mmap.mmap] | None = None

    def __enter__(self) -> SegmentReader:
        import torch

        # Operations here are small: torch's threads would wait for each other longer than they compute.
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_num_threads(self._torch_threads)
        while self._files:
            os.close(self._files.popitem()[1])

    def tensor(self, name: str, dtype: str | None = None) -> Iterator[memoryview]:
        """The bytes of a whole tensor, in its dtype or cast to another, as `blocks` yields them."""
        spec = self._source.specs[name]
        return self.blocks([Slice(name, 0, spec.numel)], dtype or spec.dtype)

    def elements(self, segments: Iterable[Segment], dtype: str) -> Tensor:
        """The elements of a sequence of segments, one after the other, cast to a dtype."""
        import torch

        segments = list(segments)
        tensor = torch.empty(sum(segment.length for segment in segments), dtype=getattr(torch, dtype))
        self.read(segments, dtype, memoryview(tensor.view(torch.uint8).numpy()))
        return tensor

    def read(self, segments: Iterable[Segment], dtype: str, into: memoryview) -> None:
        """Fill a buffer with the bytes of a sequence of segments, as `blocks` yields them."""
        done = 0
        for block in self.blocks(segments, dtype):
            into[done : done + len(block)] = block
            done += len(block)

    def blocks(self, segments: Iterable[Segment], dtype: str) -> Iterator[memoryview]:
        """The bytes of a sequence of segments, cast to a dtype; each block is valid until the next is requested.

        Raises:
            CheckpointError: a file cannot be read, or ends early, or a value does not fit the dtype.
        """
        for segment in segments:
            if isinstance(segment, Zeros):
                left = segment.length * ITEMSIZE[dtype]
                zeros = memoryview(bytes(min(left, len(self._buffer))))
                while left:
                    yield zeros[:left]
                    left -= min(left, len(zeros))
            elif isinstance(segment, TransposedSlice):
                yield from self._transposed(segment, dtype)
            elif isinstance(segment, Quantized):
                yield from self._quantized(segment)
            elif segment.plus:  # added in float32, for all dtypes, and rounded once
                import numpy as np

                for block in self.blocks([segment._replace(plus=0)], _SUM):
                    total = np.frombuffer(block, _SUM) + np.float32(segment.plus)
                    yield cast(memoryview(total).cast("B"), _SUM, dtype, segment.source)
            else:
                spec, used, position = self._source.specs[segment.source], 0, segment.start
                for path, offset, length in self._source.extents(segment):
                    file = self._open(path, spec.name)
                    while length:
                        take = min(length, len(self._buffer) - used)
                        self._read(file, self._buffer[used : used + take], offset, path, spec.name)
                        used, offset, length = used + take, offset + take, length - take
                        if used == len(self._buffer):
                            yield self._values(spec, position, self._buffer, dtype)
                            used, position = 0, position + used  # which counts elements in FP8, of a byte
                if used:
                    yield self._values(spec, position, self._buffer[:used], dtype)

    def _values(self, spec: TensorSpec, position: int, data: memoryview, dtype: str) -> memoryview:
        """The stored bytes of a tensor's elements from a position on, as their values in a dtype."""
        if spec.scales is None:
            return cast(data, spec.dtype, dtype, spec.name)
        import torch

        stored, to = spec.scales, getattr(torch, dtype)
        if self._scales is None or self._scales[0] != stored:
            scales = fp8.in_float32(self._scales_at(stored.stored, stored.dtype))
            self._scales = stored, scales, fp8.LARGEST * scales.abs().max().item()
        _, scales, largest = self._scales
        values = fp8.products(torch.frombuffer(data, dtype=torch.uint8), position, spec.shape, scales, stored.block)
        if largest <= torch.finfo(to).max:  # without the check of every value, which takes as long as the products
            return memoryview(values.to(to).view(torch.uint8).numpy())
        return cast(memoryview(values.numpy()).cast("B"), "float32", dtype, spec.name)

    def _scales_at(self, where: Extent, dtype: str) -> Any:
        """[scales] in a dtype."""
        import torch

        data = bytearray(where.length)
        self._read(self._open(where.path, "scales"), memoryview(data), where.offset, where.path, "scales")
        return torch.frombuffer(data, dtype=getattr(torch, dtype))

    def _quantized(self, segment: Quantized) -> Iterator[memoryview]:
        """Row of blocks by row of blocks."""
        import torch

        (rows, columns), (height, width) = segment.shape[-2:], segment.block
        (down, across), dtype = fp8.shape_of_scales((rows, columns), segment.block), segment.scales_in
        whole, position, end = Segments(segment.pieces), segment.start, segment.start + segment.length
        while position < end:
            if segment.of_scales:
                number = position // across
                matrix, row = divmod(number, down)
            else:
                matrix, row = divmod(position // columns, rows)
                row //= height
                number = matrix * down + row
            first, count = (matrix * rows + row * height) * columns, min(height, rows - row * height)
            values, kept = torch.empty(count, columns), None
            self.read(whole.cut(first, count * columns), _SUM, memoryview(values.numpy()).cast("B"))
            if segment.kept is not None:
                size = across * ITEMSIZE[dtype]
                of_row = Extent(segment.kept.path, segment.kept.offset + number * size, size)
                kept = self._scales_at(of_row, dtype)
            only_scales = segment.of_scales
            weights, scales = fp8.quantized(values, width, kept, getattr(torch, dtype), only_scales=only_scales)
            result, begin = (scales, number * across) if only_scales else (weights.flatten(), first)
            result = result[position - begin : end - begin]
            position += len(result)
            yield memoryview(result.view(torch.uint8).numpy())

    def _transposed(self, segment: TransposedSlice, dtype: str) -> Iterator[memoryview]:
        specs = [self._source.specs[piece.source] for piece in segment.slices]
        dtypes = {dtype if spec.scales else spec.dtype for spec in specs}
        stored = dtypes.pop() if len(dtypes) == 1 else dtype
        start, end = (number * ITEMSIZE[stored] for number in (segment.start, segment.start + segment.length))
        matrix = self._whole(segment, stored)
        for position in range(start, end, len(self._buffer)):
            block = matrix[position : min(position + len(self._buffer), end)]
            yield cast(block, stored, dtype, segment.slices[0].source)

    def _whole(self, segment: TransposedSlice, dtype: str) -> memoryview:
        """The whole matrix of a segment, transposed, in a dtype."""
        key = (segment.slices, segment.columns, dtype)
        if self._matrix is None or self._matrix[0] != key:
            import numpy as np
            import torch

            size, rows, columns = ITEMSIZE[dtype], segment.rows, segment.columns
            # The previous matrix's memory again if it has the same size. Otherwise it is freed at once.
            last, self._matrix = self._matrix, None
            if last is not None and len(last[1]) == rows * columns * size:
                memory = last[1]
            else:
                del last
                memory = mmap.mmap(-1, rows * columns * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            turned = np.frombuffer(memory, f"i{size}").reshape(columns, rows)
            segments, step = Segments(segment.slices), max(1, _STRIP // (columns * size))
            strip = np.empty((min(step, rows), columns), turned.dtype)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                self.read(segments.cut(first * columns, count * columns), dtype, memoryview(strip[:count]).cast("B"))
                # By torch, tile by tile: numpy goes against the order of the memory.
                turned[:, first : first + count] = torch.from_numpy(strip[:count]).t().contiguous().numpy()
            self._matrix = (key, memory)
        return memoryview(self._matrix[1])

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


def cast(data: memoryview, source: str, target: str, name: str) -> memoryview:
    """Cast elements to another dtype, rounded to nearest even; a CheckpointError if a finite one is too large."""
    if source == target:
        return data
    import torch

    before = torch.frombuffer(data, dtype=getattr(torch, source), count=len(data) // ITEMSIZE[source])
    after = before.to(getattr(torch, target))
    # A comparison of the extremes is ten times as fast as one of all; it fails for those that are not a number, too.
    if ITEMSIZE[target] <= ITEMSIZE[source] and not before.abs().max() <= torch.finfo(after.dtype).max:
        overflown = after.isinf() & before.isfinite()
        if overflown.any():
            raise CheckpointError(f"{name}: value {before[overflown][0].item():g} is too large for {target}")
    return memoryview(after.view(torch.uint8).numpy())
