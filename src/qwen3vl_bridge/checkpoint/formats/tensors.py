"""Tensors on disk: their descriptions, and their elements as a stream of bytes.

Three words describe pieces of tensors in this package:

- `TensorSlice`: consecutive elements of a stored tensor, in row-major order. A `Slice` is a `TensorSlice`, or elements
  computed from such slices (transposed or quantized to FP8), or zeros, or integers that follow from the configuration.
- `ByteRange`: consecutive bytes of a file. Files are read, written and resumed by byte range.
- `Chunk` (`dcp.py`): a hyperrectangle of a tensor, which a torch.distributed.checkpoint folder stores as one item.

Streams pass through one buffer of a fixed size. A matrix is in memory completely only if it is transposed: the matrix
of one expert.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.weights import fp8
from qwen3vl_bridge.weights.rows import TensorSlice

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
# Dtypes that stored weights may have, and that they can be cast to.
WEIGHT_DTYPES = ("float32", "float16", "bfloat16")

# The smallest bit pattern, without the sign bit, that is infinite or NaN.
_NOT_FINITE = {
    "float64": 0x7FF << 52, "float32": 0xFF << 23, "bfloat16": 0xFF << 7, "float16": 0x1F << 10, "float8_e4m3fn": 0x7F,
}  # fmt: skip

# Small enough to stay in a processor's cache between reading and writing.
_BLOCK_BYTES = 1 << 18
_MAX_OPEN_FILES = 32
# Additions and quantization are computed in this dtype.
_COMPUTE_DTYPE = "float32"
# Bytes of a matrix that are transposed at a time: more rows give longer contiguous writes.
_STRIP_BYTES = 1 << 19

Shape = tuple[int, ...]


class ByteRange(NamedTuple):
    """Bytes [offset, offset + length) of a file."""

    path: Path
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Return the offset of the first byte after the range."""
        return self.offset + self.length


class BlockScales(NamedTuple):
    """The scales of an FP8 tensor: where they are stored, their dtype, and the block that shares one scale."""

    stored: ByteRange
    dtype: str
    block: fp8.Block


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (as torch names it) and shape of a contiguous, row-major tensor.

    A tensor with `scales` is stored in FP8. Its `dtype` is then the default dtype in which it is read.
    """

    name: str
    dtype: str
    shape: Shape
    scales: BlockScales | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes when it is read as `dtype`. An FP8 tensor is smaller on disk."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def stored_dtype(self) -> str:
        """Return the dtype of the bytes on disk."""
        return self.dtype if self.scales is None else fp8.E4M3

    def describe(self) -> str:
        """Return shape and dtype of the tensor as text."""
        return f"{list(self.shape)} {self.dtype}"


def main_dtype(specs: Iterable[TensorSpec]) -> str:
    """Return the dtype that most elements of the tensors have."""
    counts: Counter[str] = Counter()
    for spec in specs:
        counts[spec.dtype] += spec.numel
    return counts.most_common(1)[0][0]


class TransposedSlice(NamedTuple):
    """Elements [start, start + length) of the transpose of a matrix.

    The matrix has `columns` columns, and its elements are `slices`, concatenated.
    """

    slices: tuple[TensorSlice, ...]
    columns: int
    start: int
    length: int

    @property
    def numel(self) -> int:
        """Return the number of elements of the complete matrix."""
        return sum(part.length for part in self.slices)

    @property
    def rows(self) -> int:
        """Return the number of rows of the matrix before it is transposed."""
        return self.numel // self.columns

    def cut(self, start: int, length: int) -> TransposedSlice:
        """Return `length` elements of this slice from element `start` on."""
        return self._replace(start=self.start + start, length=length)


class ZeroSlice(NamedTuple):
    """Zeros, such as the rows that pad a vocabulary."""

    length: int

    def cut(self, start: int, length: int) -> ZeroSlice:
        """Return a slice of `length` zeros."""
        del start
        return ZeroSlice(length)


class ConstantSlice(NamedTuple):
    """Elements of an int64 tensor that are known without reading a file."""

    values: tuple[int, ...]

    @property
    def length(self) -> int:
        """Return the number of integers."""
        return len(self.values)

    def cut(self, start: int, length: int) -> ConstantSlice:
        """Return `length` integers of this slice from element `start` on."""
        return ConstantSlice(self.values[start : start + length])


class QuantizedSlice(NamedTuple):
    """Elements [start, start + length) of matrices quantized to FP8, or of their scales if `is_scales` is True.

    The values to quantize are `slices`, concatenated. They have the shape [..., rows, columns].
    """

    slices: tuple[Slice, ...]
    shape: Shape
    block: fp8.Block
    scale_dtype: str
    kept_scales: ByteRange | None  # scales of the imported model; a block keeps its scale if its values are unchanged
    is_scales: bool
    start: int
    length: int

    def cut(self, start: int, length: int) -> QuantizedSlice:
        """Return `length` elements of this slice from element `start` on."""
        return self._replace(start=self.start + start, length=length)


class SharedScaleSlice(NamedTuple):
    """Elements [start, start + length) of a tensor quantized to FP8 with one stored scale.

    The values to quantize are `slices`, concatenated. If `slices` is empty, this is a slice of the scale itself.
    """

    slices: tuple[Slice, ...]
    scale: ByteRange
    scale_dtype: str
    start: int
    length: int

    def cut(self, start: int, length: int) -> SharedScaleSlice:
        """Return `length` elements of this slice from element `start` on."""
        return self._replace(start=self.start + start, length=length)


Slice = TensorSlice | TransposedSlice | ZeroSlice | ConstantSlice | QuantizedSlice | SharedScaleSlice


class SliceList:
    """A sequence of slices that stands for their concatenated elements, with fast access to any range of them."""

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._slices = tuple(slices)

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((part.length for part in self._slices), initial=0))

    def __iter__(self) -> Iterator[Slice]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    @property
    def length(self) -> int:
        """Return the total number of elements of all slices."""
        return self._starts[-1]

    def select(self, start: int, length: int) -> Iterator[Slice]:
        """Yield slices that contain exactly elements [start, start + length) of the concatenation, in order.

        Raises:
            AssertionError: the concatenation has fewer than start + length elements.
        """
        end = start + length
        if end > self.length:
            raise AssertionError(f"elements up to {end} of {self.length} were requested. Please report this")
        i = bisect_right(self._starts, start) - 1
        while start < end:
            part, first = self._slices[i], self._starts[i]
            count = min(end, first + part.length) - start
            if count:
                yield part if count == part.length else part.cut(start - first, count)
            start, i = start + count, i + 1


def merge_adjacent(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Yield slices with the elements of `slices` in order. Slices that are consecutive in one tensor become one."""
    last: Slice | None = None
    for part in slices:
        if isinstance(last, TensorSlice) and part == last._replace(start=last.start + last.length, length=part.length):
            last = last._replace(length=last.length + part.length)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


class TensorSource(Protocol):
    """A readable collection of tensors on disk."""

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Return a mutable dict from tensor name to spec (shape and dtype). Deleting an entry hides the tensor."""
        ...

    @property
    def files(self) -> Iterable[Path]:
        """Return the files that contain the tensors."""
        ...

    def byte_ranges(self, wanted: TensorSlice) -> Iterator[ByteRange]:
        """Yield the byte ranges that store the elements of a slice, in order."""
        ...


class SliceReader:
    """Read the elements of slices from a `TensorSource`. Use it as a context manager. Not thread-safe."""

    def __init__(self, source: TensorSource, block_bytes: int = _BLOCK_BYTES) -> None:
        self._source = source
        self._buffer = memoryview(bytearray(block_bytes))
        self._files: OrderedDict[Path, int] = OrderedDict()
        # Scales in float32 of the FP8 tensor that was read last, and the largest value that the tensor can contain.
        self._scales: tuple[BlockScales, Any, float] | None = None
        # The matrix that was transposed last. It contains gate and up projection, which are read one after the other.
        self._matrix: tuple[tuple[tuple[TensorSlice, ...], int, str], mmap.mmap] | None = None

    def __enter__(self) -> SliceReader:
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

    def read_tensor(self, name: str, dtype: str | None = None) -> Iterator[memoryview]:
        """Yield the bytes of a full tensor in blocks, cast to `dtype`; None for no cast. See `read_blocks`."""
        spec = self._source.specs[name]
        return self.read_blocks([TensorSlice(name, 0, spec.numel)], dtype or spec.dtype)

    def read_elements(self, slices: Iterable[Slice], dtype: str) -> Tensor:
        """Return the elements of slices, concatenated and cast to a dtype, as a tensor of one dimension."""
        import torch

        slices = list(slices)
        tensor = torch.empty(sum(part.length for part in slices), dtype=getattr(torch, dtype))
        self.read_into(memoryview(tensor.view(torch.uint8).numpy()), slices, dtype)
        return tensor

    def read_into(self, buffer: memoryview, slices: Iterable[Slice], dtype: str) -> None:
        """Fill a buffer with the concatenated elements of slices, cast to a dtype, as bytes."""
        done = 0
        for block in self.read_blocks(slices, dtype):
            buffer[done : done + len(block)] = block
            done += len(block)

    def read_blocks(self, slices: Iterable[Slice], dtype: str) -> Iterator[memoryview]:
        """Yield the concatenated elements of slices, cast to a dtype, as blocks of bytes.

        A block is valid until the next one is requested.

        Raises:
            CheckpointError: a file cannot be read or ends early, or a value is not finite or does not fit the dtype.
        """
        for part in slices:
            if isinstance(part, ZeroSlice):
                left = part.length * ITEMSIZE[dtype]
                zeros = memoryview(bytes(min(left, len(self._buffer))))
                while left:
                    yield zeros[:left]
                    left -= min(left, len(zeros))
            elif isinstance(part, TransposedSlice):
                yield from self._read_transposed(part, dtype)
            elif isinstance(part, ConstantSlice):
                yield memoryview(struct.pack(f"<{part.length}q", *part.values))
            elif isinstance(part, QuantizedSlice):
                yield from self._read_quantized(part)
            elif isinstance(part, SharedScaleSlice):
                yield from self._read_with_shared_scale(part)
            elif part.added:  # added in float32 for every dtype, and rounded once
                import numpy as np

                for block in self.read_blocks([part._replace(added=0)], _COMPUTE_DTYPE):
                    total = np.frombuffer(block, _COMPUTE_DTYPE) + np.float32(part.added)
                    yield cast(memoryview(total).cast("B"), _COMPUTE_DTYPE, dtype, part.tensor)
            else:
                spec, used, position = self._source.specs[part.tensor], 0, part.start
                for path, offset, length in self._source.byte_ranges(part):
                    file = self._open(path, spec.name)
                    while length:
                        count = min(length, len(self._buffer) - used)
                        self._read_exactly(file, self._buffer[used : used + count], offset, path, spec.name)
                        used, offset, length = used + count, offset + count, length - count
                        if used == len(self._buffer):
                            yield self._decode(spec, position, self._buffer, dtype)
                            used, position = 0, position + used // ITEMSIZE[spec.stored_dtype]
                if used:
                    yield self._decode(spec, position, self._buffer[:used], dtype)

    def _decode(self, spec: TensorSpec, position: int, data: memoryview, dtype: str) -> memoryview:
        """Cast stored bytes of the tensor `spec` to `dtype`. Raise CheckpointError for NaN or infinity.

        `position` is the index in the tensor of the first element in `data`.
        """
        check_finite(spec, position, data)
        if spec.scales is None:
            return cast(data, spec.dtype, dtype, spec.name)
        import torch

        stored, to = spec.scales, getattr(torch, dtype)
        if self._scales is None or self._scales[0] != stored:
            scales = fp8.scales_to_float32(self._read_scales(stored.stored, stored.dtype))
            try:
                fp8.check_scales(scales, spec.shape, stored.block)
            except ValueError as error:
                raise CheckpointError(f"{stored.stored.path}, tensor {spec.name}: {error}") from error
            self._scales = stored, scales, fp8.LARGEST * scales.abs().max().item()
        _, scales, largest = self._scales
        values = fp8.dequantize_elements(
            torch.frombuffer(data, dtype=torch.uint8), position, spec.shape, scales, stored.block
        )
        # Checking every value takes as long as computing it, so values are checked only if one may be too large.
        if largest <= torch.finfo(to).max:
            return memoryview(values.to(to).view(torch.uint8).numpy())
        return cast(memoryview(values.numpy()).cast("B"), "float32", dtype, spec.name)

    def read_scale(self, stored: ByteRange, dtype: str) -> float:
        """Return a single stored scale of FP8 weights. Its dtype is one of `fp8.SCALE_DTYPES`."""
        return fp8.scales_to_float32(self._read_scales(stored, dtype)).item()

    def _read_scales(self, stored: ByteRange, dtype: str) -> Tensor:
        import torch

        data = bytearray(stored.length)
        self._read_exactly(self._open(stored.path, "scales"), memoryview(data), stored.offset, stored.path, "scales")
        return torch.frombuffer(data, dtype=getattr(torch, dtype))

    def _read_quantized(self, part: QuantizedSlice) -> Iterator[memoryview]:
        """Yield the bytes of quantized weights or scales, one row of quantization blocks at a time."""
        import torch

        (rows, columns), (height, width) = part.shape[-2:], part.block
        (down, across), dtype = fp8.scales_shape((rows, columns), part.block), part.scale_dtype
        values_to_read, position, end = SliceList(part.slices), part.start, part.start + part.length
        while position < end:
            if part.is_scales:
                block_row = position // across
                matrix, row = divmod(block_row, down)
            else:
                matrix, row = divmod(position // columns, rows)
                row //= height
                block_row = matrix * down + row
            first, count = (matrix * rows + row * height) * columns, min(height, rows - row * height)
            values, kept = torch.empty(count, columns), None
            wanted = values_to_read.select(first, count * columns)
            self.read_into(memoryview(values.numpy()).cast("B"), wanted, _COMPUTE_DTYPE)
            if part.kept_scales is not None:
                size = across * ITEMSIZE[dtype]
                path, offset, _ = part.kept_scales
                kept = self._read_scales(ByteRange(path, offset + block_row * size, size), dtype)
            try:
                weights, scales = fp8.quantize(values, width, kept, getattr(torch, dtype), only_scales=part.is_scales)
            except ValueError as error:
                names = sorted({source.tensor for source in part.slices if isinstance(source, TensorSlice)})
                raise CheckpointError(f"{', '.join(names)}, rows from {row * height} on: {error}") from error
            result, begin = (scales, block_row * across) if part.is_scales else (weights.flatten(), first)
            result = result[position - begin : end - begin]
            position += len(result)
            yield memoryview(result.view(torch.uint8).numpy())

    def _read_with_shared_scale(self, part: SharedScaleSlice) -> Iterator[memoryview]:
        """Yield the bytes of weights quantized with a stored scale, or of the scale."""
        import torch

        if not part.slices:
            yield memoryview(self._read_scales(part.scale, part.scale_dtype).view(torch.uint8).numpy())
            return
        scale = self.read_scale(part.scale, part.scale_dtype)
        wanted = SliceList(part.slices).select(part.start, part.length)
        for block in self.read_blocks(wanted, _COMPUTE_DTYPE):
            try:
                weights = fp8.quantize_with_scale(torch.frombuffer(block, dtype=torch.float32), scale)
            except ValueError as error:
                names = sorted({source.tensor for source in part.slices if isinstance(source, TensorSlice)})
                raise CheckpointError(f"{', '.join(names)}: {error}; export without --quantize") from error
            yield memoryview(weights.numpy())

    def _read_transposed(self, part: TransposedSlice, dtype: str) -> Iterator[memoryview]:
        specs = [self._source.specs[source.tensor] for source in part.slices]
        dtypes = {dtype if spec.scales else spec.dtype for spec in specs}
        stored = dtypes.pop() if len(dtypes) == 1 else dtype
        start, end = (number * ITEMSIZE[stored] for number in (part.start, part.start + part.length))
        matrix = self._transpose(part, stored)
        for position in range(start, end, len(self._buffer)):
            block = matrix[position : min(position + len(self._buffer), end)]
            yield cast(block, stored, dtype, part.slices[0].tensor)

    def _transpose(self, part: TransposedSlice, dtype: str) -> memoryview:
        """Return all elements of the transposed matrix that `part` is a slice of, cast to `dtype`."""
        key = (part.slices, part.columns, dtype)
        if self._matrix is None or self._matrix[0] != key:
            import numpy as np
            import torch

            size, rows, columns = ITEMSIZE[dtype], part.rows, part.columns
            # Reuse the memory of the previous matrix if it has the same size. Otherwise free it before allocating.
            last, self._matrix = self._matrix, None
            if last is not None and len(last[1]) == rows * columns * size:
                memory = last[1]
            else:
                del last
                memory = mmap.mmap(-1, rows * columns * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            transposed = np.frombuffer(memory, f"i{size}").reshape(columns, rows)
            slices, step = SliceList(part.slices), max(1, _STRIP_BYTES // (columns * size))
            strip = np.empty((min(step, rows), columns), transposed.dtype)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                wanted = slices.select(first * columns, count * columns)
                self.read_into(memoryview(strip[:count]).cast("B"), wanted, dtype)
                # torch transposes tile by tile; numpy would jump through memory for each element.
                transposed[:, first : first + count] = torch.from_numpy(strip[:count]).t().contiguous().numpy()
            self._matrix = (key, memory)
        return memoryview(self._matrix[1])

    def _open(self, path: Path, name: str) -> int:
        """Return a file descriptor to read a file, from the cache of recently used files if possible."""
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) >= _MAX_OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path}, tensor {name}: {error.strerror}") from error
        self._files[path] = file
        return file

    def _read_exactly(self, file: int, into: memoryview, offset: int, path: Path, name: str) -> None:
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


def check_finite(spec: TensorSpec, position: int, data: memoryview) -> None:
    """Raise CheckpointError if `data`, stored bytes of a tensor from element `position` on, contain NaN or infinity."""
    if (least := _NOT_FINITE.get(spec.stored_dtype)) is None:
        return
    import numpy as np

    # NaN and infinity have the largest exponent, so as integers they are the largest of either sign. Two maxima take a
    # tenth of the time of comparing each value.
    size = ITEMSIZE[spec.stored_dtype]
    signed, unsigned = (np.frombuffer(data, f"<{kind}{size}") for kind in "iu")
    sign = 1 << (8 * size - 1)
    if signed.max() < least and unsigned.max() < least + sign:
        return
    first = position + int(np.argmax((unsigned & (sign - 1)) >= least))
    index = [int(number) for number in np.unravel_index(first, spec.shape)]
    raise CheckpointError(
        f"tensor {spec.name}: the value at {index} is NaN or infinite, so results would be NaN; use another "
        "copy of the weights, or an earlier iteration of the run"
    )


def cast(data: memoryview, source: str, target: str, name: str) -> memoryview:
    """Cast elements to another dtype, rounded to nearest even; raise CheckpointError if a finite value overflows."""
    if source == target:
        return data
    import torch

    before = torch.frombuffer(data, dtype=getattr(torch, source), count=len(data) // ITEMSIZE[source])
    after = before.to(getattr(torch, target))
    # Comparing the maximum is ten times as fast as comparing every value. The comparison is false for NaN, too.
    if ITEMSIZE[target] <= ITEMSIZE[source] and not before.abs().max() <= torch.finfo(after.dtype).max:
        overflown = after.isinf() & before.isfinite()
        if overflown.any():
            raise CheckpointError(
                f"{name}: value {before[overflown][0].item():g} is too large for {target}; use a dtype with a larger "
                "range"
            )
    return memoryview(after.view(torch.uint8).numpy())


def compare_streams(left: Iterator[memoryview], right: Iterator[memoryview], dtype: str) -> tuple[int, int] | None:
    """Compare two streams of elements bit by bit.

    Return (number of elements that differ, index of the first), or None if the streams are equal.
    """
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
        raise AssertionError("the compared tensors have different numbers of elements")
    return (count, first) if count else None
