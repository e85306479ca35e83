"""A torch.distributed.checkpoint folder as a source of tensors, for all writers and chunk sizes.

A tensor may be in tens of thousands of boxes, and a box in as many ranges, so complete lists of either are never made.
"""

from __future__ import annotations

import heapq
import io
import itertools
import math
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from qwen3vl_bridge.checkpoint.formats.dcp_metadata import Chunk, DcpMetadata, empty_dict, restricted_loads
from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, Extent, Shape, Slice, TensorSpec
from qwen3vl_bridge.io.files import CheckpointError

_MAX_PICKLE = 1 << 20


class DcpTensors:
    """Some tensors of a folder, under given names, as a `TensorSource`."""

    def __init__(self, metadata: DcpMetadata, keys: Mapping[str, str]) -> None:
        """Choose tensors, given name -> key in the folder; a CheckpointError if two chunks are the same item."""
        self.folder = metadata.folder
        self.specs: dict[str, TensorSpec] = {}
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._tilings: dict[str, Tiling] = {}
        self._payloads: dict[Extent, Extent] = {}
        owners: dict[tuple[Path, int], str] = {}
        for name, key in keys.items():
            spec, chunks = metadata.tensors[key]
            self.specs[name], self._chunks[name] = TensorSpec(name, spec.dtype, spec.shape), chunks
            self._tilings[name] = Tiling(spec.shape, [chunk[:2] for chunk in chunks])
            for path, offset, _ in (chunk.item for chunk in chunks):
                if (path, offset) in owners:
                    both = f"{owners[path, offset]} and of {name}"
                    raise CheckpointError(f"{path}: byte {offset} is a chunk of {both}, expected one of them")
                owners[path, offset] = name

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """See `TensorSource`; a CheckpointError if an element is in no chunk or in two, or an item is damaged."""
        spec, chunks, tiling = (self.specs[wanted.source], self._chunks[wanted.source], self._tilings[wanted.source])
        size, position, end = ITEMSIZE[spec.dtype], wanted.start, wanted.start + wanted.length
        for block in itertools.chain(tiling.blocks(position, wanted.length), [Block(end, 0, 0, 0)]):
            if block.start != position:
                where = f"{self.folder}, tensor {spec.name} {spec.shape}"
                number = "no chunk" if block.start > position else "two chunks"
                raise CheckpointError(f"{where}: element {min(position, block.start)} is in {number}")
            if not block.length:
                return
            position += block.length
            item = chunks[block.box].item
            payload = self._payloads.get(item)
            if payload is None:
                payload = find_payload(item, spec.dtype, chunks[block.box].sizes, wanted.source)
                self._payloads[item] = payload
            yield Extent(payload.path, payload.offset + block.first * size, block.length * size)

    @property
    def files(self) -> list[Path]:
        """See `TensorSource`."""
        return sorted({chunk.item.path for chunks in self._chunks.values() for chunk in chunks})


class Block(NamedTuple):
    """Elements [start, start + length) of a tensor are elements [first, first + length) of the box number `box`."""

    start: int
    length: int
    box: int
    first: int


class _Box(NamedTuple):
    """A box: the elements that it spans, its number, and its ranges.

    Range number i begins at `begin` plus i, written with the digits `counts`, times `strides`; all have `length`.
    """

    begin: int
    end: int
    number: int
    counts: Shape
    strides: Shape
    length: int

    def start_of(self, stretch: int) -> int:
        start = self.begin
        for count, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            stretch, digit = divmod(stretch, count)
            start += digit * stride
        return start

    def blocks(self, start: int, end: int) -> Iterator[Block]:
        """The blocks with elements in [start, end), cut to it, in order."""
        stretches = range(math.prod(self.counts))
        for i in range(max(bisect_right(stretches, start, key=self.start_of) - 1, 0), len(stretches)):
            first = self.start_of(i)
            if first >= end:
                return
            low, high = max(first, start), min(first + self.length, end)
            if low < high:
                yield Block(low, high - low, self.number, i * self.length + low - first)


class Tiling:
    """A tensor cut into boxes."""

    def __init__(self, shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> None:
        """Sort the boxes, which are (offsets, sizes) inside the tensor."""
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        found = (_box(shape, strides, offsets, sizes, i) for i, (offsets, sizes) in enumerate(boxes))
        # Boxes that interleave, such as blocks of columns, form a group.
        self._groups: list[list[_Box]] = []
        end = 0
        for box in sorted(box for box in found if box is not None):
            if self._groups and box.begin < end:
                self._groups[-1].append(box)
            else:
                self._groups.append([box])
            end = max(end, box.end)
        self._starts = [group[0].begin for group in self._groups]

    def blocks(self, start: int, length: int) -> Iterator[Block]:
        """Elements [start, start + length) that are in boxes, in order; one that is in two comes twice."""
        end = start + length
        for group in itertools.islice(self._groups, max(bisect_right(self._starts, start) - 1, 0), None):
            if group[0].begin >= end:
                return
            yield from heapq.merge(*(box.blocks(start, end) for box in group))


def _box(shape: Shape, strides: Shape, offsets: Shape, sizes: Shape, number: int) -> _Box | None:
    if math.prod(sizes) == 0:
        return None
    # Dimensions after `whole` are spanned completely, so the box consists of ranges of `length` elements.
    whole = len(shape)
    while whole > 0 and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)
    begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    end = 1 + begin + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return _Box(begin, end, number, sizes[:outer], strides[:outer], math.prod(sizes[outer:]))


class _Window(io.RawIOBase):
    """Part of a file as a separate file object."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if position < 0:
            raise ValueError(f"seek to {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def find_payload(item: Extent, dtype: str, sizes: Shape, name: str) -> Extent:
    """Where the bytes of an item's tensor are: an item of a `.distcp` file is a torch zip archive.

    A CheckpointError if it is damaged, requires code, is not contiguous, or not what it is by the metadata: the tensor
    `name` of this dtype and shape.
    """
    where = f"{item.path}, {name}: the item at byte {item.offset}"
    try:
        with item.path.open("rb", buffering=0) as file:
            window = io.BufferedReader(_Window(file, item.offset, item.length), 4096)
            archive = zipfile.ZipFile(window)
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}

            def span_of(record: str) -> tuple[int, int]:
                """Start of a record's bytes within the item, and their number."""
                info = records[record]
                if info.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is compressed, which torch never writes")
                with archive.open(info):  # which reads the record's own header, and nothing after it
                    start = window.tell()
                if start + info.file_size > item.length or info.compress_size != info.file_size:
                    raise ValueError(f"record {record} ends outside the item")
                return start, info.file_size

            def bytes_of(record: str) -> bytes:
                start, length = span_of(record)
                if length > _MAX_PICKLE:
                    raise ValueError(f"record {record} has {length} bytes")
                window.seek(start)
                return window.read(length)

            if "byteorder" in records and bytes_of("byteorder") != b"little":
                raise ValueError("it is not little-endian")
            tensor = restricted_loads(bytes_of("data.pkl"), where, _GLOBALS, _storage)
            if not isinstance(tensor, _Tensor):
                raise ValueError(f"it is a {type(tensor).__name__}")
            start, length = span_of(f"data/{tensor.storage.key}")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{item.path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged archive can fail in any way
        raise CheckpointError(f"{where} cannot be read: {str(error) or type(error).__name__}") from error
    if (tensor.storage.dtype, tensor.sizes) != (dtype, sizes):
        found = f"found {list(tensor.sizes)} {tensor.storage.dtype}"
        raise CheckpointError(f"{where}: {found}, expected {list(sizes)} {dtype} by the metadata")
    first, nbytes = tensor.offset * ITEMSIZE[dtype], math.prod(sizes) * ITEMSIZE[dtype]
    strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
    if nbytes and any(s != t for s, t, n in zip(tensor.strides, strides, sizes, strict=True) if n > 1):
        raise CheckpointError(f"{where}: found strides {tensor.strides}, expected a contiguous tensor")
    if first + nbytes > length:
        raise CheckpointError(f"{where}: found {length} bytes, expected {first + nbytes}")
    return Extent(item.path, item.offset + start + first, nbytes)


class _Storage(NamedTuple):
    dtype: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    sizes: Shape
    strides: Shape


def _storage(pid: Any) -> _Storage:
    kind, dtype, key, _device, _numel = pid
    if kind != "storage" or not isinstance(dtype, str) or dtype not in ITEMSIZE or not isinstance(key, str):
        raise ValueError(f"reference to {kind}")
    return _Storage(dtype, key)


def _rebuild(storage: Any, offset: Any, sizes: Any, strides: Any, *_rest: Any) -> _Tensor:
    numbers = (offset, *sizes, *strides)
    if not isinstance(storage, _Storage) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise ValueError("a tensor of something else")
    if len(sizes) != len(strides):
        raise ValueError(f"{len(sizes)} sizes and {len(strides)} strides")
    return _Tensor(storage, offset, tuple(sizes), tuple(strides))


_DTYPES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
}  # fmt: skip
_GLOBALS = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("collections", "OrderedDict"): empty_dict,
    **{("torch", f"{name}Storage"): dtype for name, dtype in _DTYPES.items()},
}
