"""Read and write torch.distributed.checkpoint (DCP) folders without a process group and without loading tensors.

A DCP folder has a pickled `.metadata` file and `.distcp` files. A tensor is stored as chunks: hyperrectangles of it.
Each chunk is one item of a `.distcp` file, a zip archive as `torch.save` writes it. Elements of a chunk that are
consecutive in the tensor are called a run. A chunk may have tens of thousands of runs, so they are never listed.
"""

from __future__ import annotations

import heapq
import io
import itertools
import math
import os
import pickle
import tempfile
import uuid
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from qwen3vl_bridge.checkpoint.formats import output_files
from qwen3vl_bridge.checkpoint.formats.output_files import OutputFile, TensorData
from qwen3vl_bridge.checkpoint.formats.tensors import (
    ITEMSIZE,
    BlockScales,
    ByteRange,
    Shape,
    SliceList,
    TensorSlice,
    TensorSpec,
)
from qwen3vl_bridge.core.files import (
    CheckpointError,
    PickledRecord,
    file_size,
    load_pickle,
    read_bytes,
    resolve_within,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

METADATA = ".metadata"
_TABLE_SCALES = ".weight_scale"
_MAX_DIMENSIONS, _MAX_METADATA_BYTES, _MAX_ITEM_PICKLE_BYTES = 32, 1 << 31, 1 << 20

_DCP = "torch.distributed.checkpoint"
_PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath")


def _records(module: str, *names: str) -> dict[tuple[str, str], type[PickledRecord]]:
    return {(module, name): type(name, (PickledRecord,), {"kind": name, "__slots__": ()}) for name in names}


def _size(values: Any = ()) -> tuple[Any, ...]:
    if not isinstance(values, (tuple, list)):
        raise pickle.UnpicklingError(f"torch.Size of a {type(values).__name__}")
    return tuple(values)


def _empty_dict() -> dict[Any, Any]:
    """Return an empty dict for a pickled OrderedDict. Accept no items, because keys would be hashed unchecked."""
    return {}


def _text(*parts: Any) -> str:
    return "/".join(str(part)[:4096] if isinstance(part, str | int) else type(part).__name__ for part in parts)


METADATA_GLOBALS: Mapping[tuple[str, str], Any] = {
    **_records(f"{_DCP}.metadata", "Metadata", "TensorStorageMetadata", "BytesStorageMetadata"),
    **_records(f"{_DCP}.metadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta"),
    **_records(f"{_DCP}.filesystem", "_StorageInfo"),
    # megatron-core leaves its writers' plans in the file; they are not read here.
    **_records(f"{_DCP}.planner", "SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData"),
    (f"{_DCP}.planner", "WriteItemType"): _text,
    **{("torch", name): name for name in ITEMSIZE},
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _empty_dict,
    ("torch.serialization", "_get_layout"): _text,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _text,
    **{(module, name): _text for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


class Chunk(NamedTuple):
    """A hyperrectangle of a tensor, and the bytes of a file (an item) that store it."""

    offsets: Shape
    sizes: Shape
    item: ByteRange


@dataclass
class DcpMetadata:
    """The tensors and other items of a DCP folder, as listed in its `.metadata`."""

    folder: Path
    tensors: dict[str, tuple[TensorSpec, tuple[Chunk, ...]]] = field(default_factory=dict)  # by key
    byte_items: dict[str, ByteRange] = field(default_factory=dict)  # items other than tensors, by key


def read_metadata(folder: Path) -> DcpMetadata:
    """Read and check `folder/.metadata`; raise CheckpointError if it is damaged or contradicts itself."""
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a torch.distributed.checkpoint folder: it has no {METADATA}")
    try:
        data = read_bytes(path, _MAX_METADATA_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if not data:
        raise CheckpointError(f"{path} is empty, expected torch.distributed.checkpoint Metadata")
    top = load_pickle(data, str(path), METADATA_GLOBALS)
    if not isinstance(top, PickledRecord) or top.kind != "Metadata":
        raise CheckpointError(f"{path} holds a {_kind(top)}, expected torch.distributed.checkpoint Metadata")
    return _MetadataChecker(folder, path).check(top)


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, PickledRecord) else type(value).__name__


class _MetadataChecker:
    """Converts unpickled metadata to `DcpMetadata`, and checks all values and all files that the metadata name."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self.files: dict[str, tuple[Path, int]] = {}
        self.storage: dict[tuple[str, Shape | None], Any] = {}

    def check(self, top: PickledRecord) -> DcpMetadata:
        entries = self.expect(top.field("state_dict_metadata"), dict, "state_dict_metadata")
        for index, info in self.expect(top.field("storage_data"), dict, "storage_data").items():
            self.expect(index, "MetadataIndex", "storage_data")
            key, offset = self.expect(index.field("fqn"), str, "storage_data"), index.field("offset")
            if offset is not None:
                offset = self.check_numbers(offset, f"{key}, storage_data")
            self.storage[key, offset] = info
        result = DcpMetadata(self.folder)
        for key, entry in entries.items():
            self.expect(key, str, "a key")
            if _kind(entry) == "BytesStorageMetadata":
                result.byte_items[key] = self.check_item(self.storage.get((key, None)), key)
            else:
                result.tensors[key] = self.check_tensor(key, entry)
        return result

    def error(self, where: str, found: Any, expected: str) -> CheckpointError:
        # Only plain values are printed: nested values of a file may be endless.
        if isinstance(found, tuple) and all(isinstance(entry, int) for entry in found):
            shown = str(found[:_MAX_DIMENSIONS])
        else:
            shown = str(found)[:120] if isinstance(found, (str, int, float, type(None))) else _kind(found)
        return CheckpointError(f"{self.path}, {where}: found {shown}, expected {expected}")

    def expect(self, value: Any, kind: type | str, where: str) -> Any:
        """Return `value` after a check of its type.

        Args:
            kind: the expected type, or the class name of the expected pickled record.
            where: place of the value in the metadata, for errors.

        Raises:
            CheckpointError: the value has another type.
        """
        if not (_kind(value) == kind if isinstance(kind, str) else isinstance(value, kind)):
            raise self.error(where, _kind(value), kind if isinstance(kind, str) else kind.__name__)
        return value

    def check_numbers(self, value: Any, where: str) -> Shape:
        valid = isinstance(value, tuple) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
        if not valid or len(value) > _MAX_DIMENSIONS:
            raise self.error(where, value, "a tuple of whole numbers")
        return value

    def check_tensor(self, key: str, entry: Any) -> tuple[TensorSpec, tuple[Chunk, ...]]:
        self.expect(entry, "TensorStorageMetadata", key)
        properties = self.expect(entry.field("properties"), "TensorProperties", key).state
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise self.error(key, dtype, "a dtype")
        spec = TensorSpec(key, dtype, self.check_numbers(entry.field("size"), f"{key}, size"))
        chunks = self.expect(entry.field("chunks"), list, f"{key}, chunks")
        return spec, tuple(self.check_chunk(spec, chunk) for chunk in chunks)

    def check_chunk(self, spec: TensorSpec, chunk: Any) -> Chunk:
        self.expect(chunk, "ChunkStorageMetadata", spec.name)
        offsets = self.check_numbers(chunk.field("offsets"), f"{spec.name}, chunk offsets")
        sizes = self.check_numbers(chunk.field("sizes"), f"{spec.name}, chunk sizes")
        in_range = len(offsets) == len(sizes) == len(spec.shape) and all(
            offset + size <= limit for offset, size, limit in zip(offsets, sizes, spec.shape, strict=True)
        )
        if not in_range:
            raise self.error(spec.name, f"a chunk of {sizes} at {offsets}", f"a chunk inside {spec.shape}")
        item = self.check_item(self.storage.get((spec.name, offsets)), f"{spec.name}, chunk at {list(offsets)}")
        if item.length < math.prod(sizes) * ITEMSIZE[spec.dtype]:
            raise self.error(spec.name, f"{item.length} bytes for a chunk of {sizes}", f"enough bytes for {spec.dtype}")
        return Chunk(offsets, sizes, item)

    def check_item(self, info: Any, where: str) -> ByteRange:
        self.expect(info, "_StorageInfo", where)
        if info.field("transform_descriptors"):
            raise self.error(where, "an item with transforms such as compression", "an item without transforms")
        relative = self.expect(info.field("relative_path"), str, f"{where}, file")
        offset, length = self.check_numbers((info.field("offset"), info.field("length")), f"{where}, place")
        if relative not in self.files:
            path = resolve_within(self.folder, relative, f"{self.path}, {where}")
            self.files[relative] = path, file_size(path, f"{self.path}, {where}")
        path, size = self.files[relative]
        if offset + length > size:
            raise CheckpointError(f"{path} has {size} bytes, expected {offset + length} at least, for {where}")
        return ByteRange(path, offset, length)


class DcpTensors:
    """`TensorSource` of selected tensors of a DCP folder, under given names."""

    def __init__(self, metadata: DcpMetadata, keys: Mapping[str, str]) -> None:
        """Select tensors. `keys` maps the name of each tensor to its key in the folder.

        Raises:
            CheckpointError: two chunks are stored at the same offset of a file.
        """
        self.folder = metadata.folder
        self.specs: dict[str, TensorSpec] = {}
        self._dtypes: dict[str, str] = {}  # of the bytes on disk
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._indices: dict[str, ChunkIndex] = {}
        self._payloads: dict[ByteRange, ByteRange] = {}
        names: dict[tuple[Path, int], str] = {}
        for name, key in keys.items():
            spec, chunks = metadata.tensors[key]
            self.specs[name], self._chunks[name] = TensorSpec(name, spec.dtype, spec.shape), chunks
            self._dtypes[name] = spec.dtype
            self._indices[name] = ChunkIndex(spec.shape, [chunk[:2] for chunk in chunks])
            for path, offset, _ in (chunk.item for chunk in chunks):
                if (path, offset) in names:
                    both = f"{names[path, offset]} and of {name}"
                    raise CheckpointError(
                        f"{path}: chunks of {both} begin at byte {offset}, expected only one chunk there. The metadata "
                        "are damaged: use another copy of the checkpoint, or an earlier iteration"
                    )
                names[path, offset] = name
        self._dequantize_specs()

    def _dequantize_specs(self) -> None:
        """Give n-gram tables in FP8 the dtype bfloat16, and leave their scales out.

        `X.weight_scale` has the bytes of the float32 scales of the tables `X.weight0`, `X.weight1`, ...
        """
        for scales in [name for name in self.specs if name.endswith(_TABLE_SCALES)]:
            of_scales, prefix = self.specs[scales], scales.removesuffix("_scale")
            heads = (f"{prefix}{head}" for head in itertools.count())
            for head, name in enumerate(itertools.takewhile(self.specs.__contains__, heads)):
                spec = self.specs[name]
                if (spec.dtype, of_scales.dtype) != ("uint8", "uint8") or 4 * head + 4 > of_scales.numel:
                    raise CheckpointError(
                        f"{self.folder}, tensor {name} {spec.describe()}: found {of_scales.describe()} as {scales}, "
                        "expected uint8, with 4 bytes of a scale for each hash head"
                    )
                (stored,) = self.byte_ranges(TensorSlice(scales, 4 * head, 4))
                block = spec.shape[-2], spec.shape[-1]
                self.specs[name] = replace(spec, dtype="bfloat16", scales=BlockScales(stored, "float32", block))
            del self.specs[scales]

    def byte_ranges(self, wanted: TensorSlice) -> Iterator[ByteRange]:
        """Yield the byte ranges that store the elements of a slice, in order.

        Raises:
            CheckpointError: an element is in no chunk or in two chunks, or the item of a chunk is damaged.
        """
        name = wanted.tensor
        spec, chunks = self.specs[name], self._chunks[name]
        size, position, end = ITEMSIZE[self._dtypes[name]], wanted.start, wanted.start + wanted.length
        found = self._indices[name].find(position, wanted.length)
        for part in itertools.chain(found, [ChunkSlice(end, 0, 0, 0)]):
            if part.start != position:
                where = f"{self.folder}, tensor {spec.name} {spec.shape}"
                number = "no chunk" if part.start > position else "two chunks"
                raise CheckpointError(
                    f"{where}: element {min(position, part.start)} is in {number}, expected one. Use another copy of "
                    "the checkpoint, or an earlier iteration"
                )
            if not part.length:
                return
            position += part.length
            item = chunks[part.chunk].item
            payload = self._payloads.get(item)
            if payload is None:
                payload = find_payload(item, self._dtypes[name], chunks[part.chunk].sizes, name)
                self._payloads[item] = payload
            yield ByteRange(payload.path, payload.offset + part.first * size, part.length * size)

    @property
    def files(self) -> list[Path]:
        """Return the sorted paths of the files that contain the selected tensors."""
        return sorted({chunk.item.path for chunks in self._chunks.values() for chunk in chunks})


class ChunkSlice(NamedTuple):
    """Elements [start, start + length) of a tensor, stored as elements [first, first + length) of chunk `chunk`."""

    start: int
    length: int
    chunk: int
    first: int


class _ChunkRuns(NamedTuple):
    """The runs of one chunk: sequences of `length` elements that are consecutive in the tensor.

    The first element of the chunk is element `begin` of the tensor, and the last one is element `end` - 1. Runs are
    numbered in row-major order over dimensions of the sizes `counts`. A run starts at `begin` plus the sum of index
    times stride over these dimensions.
    """

    begin: int
    end: int
    chunk: int
    counts: Shape
    strides: Shape
    length: int

    def start_of(self, run: int) -> int:
        start = self.begin
        for count, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            run, digit = divmod(run, count)
            start += digit * stride
        return start

    def find(self, start: int, end: int) -> Iterator[ChunkSlice]:
        """Yield the parts of the runs that lie in elements [start, end) of the tensor, in order."""
        runs = range(math.prod(self.counts))
        for i in range(max(bisect_right(runs, start, key=self.start_of) - 1, 0), len(runs)):
            first = self.start_of(i)
            if first >= end:
                return
            low, high = max(first, start), min(first + self.length, end)
            if low < high:
                yield ChunkSlice(low, high - low, self.chunk, i * self.length + low - first)


class ChunkIndex:
    """Find the chunks of a tensor that contain given elements."""

    def __init__(self, shape: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> None:
        """Prepare a search for chunks of a tensor with the shape `shape`. `chunks` are given as (offsets, sizes)."""
        tensor_strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        found = []
        for number, (offsets, sizes) in enumerate(chunks):
            if math.prod(sizes) == 0:
                continue
            # The chunk spans dimensions from `full` on completely. So a run continues over all of these.
            full = len(shape)
            while full > 0 and sizes[full - 1] == shape[full - 1]:
                full -= 1
            outer = max(full - 1, 0)
            begin = sum(offset * stride for offset, stride in zip(offsets, tensor_strides, strict=True))
            end = 1 + begin + sum((size - 1) * stride for size, stride in zip(sizes, tensor_strides, strict=True))
            length = math.prod(sizes[outer:])
            found.append(_ChunkRuns(begin, end, number, sizes[:outer], tensor_strides[:outer], length))
        # Chunks that interleave, such as groups of columns, are merged when they are searched.
        self._groups: list[list[_ChunkRuns]] = []
        end = 0
        for chunk in sorted(found):
            if self._groups and chunk.begin < end:
                self._groups[-1].append(chunk)
            else:
                self._groups.append([chunk])
            end = max(end, chunk.end)
        self._starts = [group[0].begin for group in self._groups]

    def find(self, start: int, length: int) -> Iterator[ChunkSlice]:
        """Yield the parts of chunks that store elements [start, start + length) of the tensor, in order.

        An element that is in two chunks is yielded twice.
        """
        end = start + length
        for group in itertools.islice(self._groups, max(bisect_right(self._starts, start) - 1, 0), None):
            if group[0].begin >= end:
                return
            yield from heapq.merge(*(chunk.find(start, end) for chunk in group))


class _FileWindow(io.RawIOBase):
    """A byte range of an open file as a file object."""

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
            raise ValueError(f"byte {position} is before its beginning")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def find_payload(item: ByteRange, dtype: str, sizes: Shape, name: str) -> ByteRange:
    """Return the byte range of a tensor's elements within an item of a `.distcp` file, a zip archive of torch.

    Args:
        item: the item.
        dtype, sizes, name: the tensor that the item contains according to the metadata.

    Raises:
        CheckpointError: the item is damaged, unpickling it would run code, or the tensor in it is not contiguous or has
            another dtype or shape.
    """
    where = f"{item.path}, {name}: the item at byte {item.offset}"
    try:
        with item.path.open("rb", buffering=0) as file:
            window = io.BufferedReader(_FileWindow(file, item.offset, item.length), 4096)
            archive = zipfile.ZipFile(window)
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}

            def find_record(record: str) -> tuple[int, int]:
                """Return (offset in the item, length in bytes) of a record of the archive."""
                info = records[record]
                if info.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is compressed, which torch never writes")
                with archive.open(info):  # reads the record's own header, and nothing after it
                    start = window.tell()
                if start + info.file_size > item.length or info.compress_size != info.file_size:
                    raise ValueError(f"record {record} ends outside the item")
                return start, info.file_size

            def read_record(record: str) -> bytes:
                start, length = find_record(record)
                if length > _MAX_ITEM_PICKLE_BYTES:
                    raise ValueError(f"record {record} has {length} bytes, expected at most {_MAX_ITEM_PICKLE_BYTES}")
                window.seek(start)
                return window.read(length)

            if "byteorder" in records and read_record("byteorder") != b"little":
                raise ValueError("it is not little-endian")
            tensor = load_pickle(read_record("data.pkl"), where, _ITEM_GLOBALS, _to_storage)
            if not isinstance(tensor, _PickledTensor):
                raise ValueError(f"it contains a {type(tensor).__name__}, expected a tensor")
            start, length = find_record(f"data/{tensor.storage.key}")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{item.path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged archive can fail in any way
        raise CheckpointError(f"{where} cannot be read: {str(error) or type(error).__name__}") from error
    if (tensor.storage.dtype, tensor.sizes) != (dtype, sizes):
        found = f"found {list(tensor.sizes)} {tensor.storage.dtype}"
        raise CheckpointError(f"{where}: {found}, expected {list(sizes)} {dtype} as in the metadata")
    first, nbytes = tensor.offset * ITEMSIZE[dtype], math.prod(sizes) * ITEMSIZE[dtype]
    strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
    if nbytes and any(s != t for s, t, n in zip(tensor.strides, strides, sizes, strict=True) if n > 1):
        raise CheckpointError(f"{where}: found strides {tensor.strides}, expected a contiguous tensor")
    if first + nbytes > length:
        raise CheckpointError(f"{where}: the storage has {length} bytes, expected {first + nbytes} or more")
    return ByteRange(item.path, item.offset + start + first, nbytes)


class _PickledStorage(NamedTuple):
    dtype: str
    key: str


class _PickledTensor(NamedTuple):
    storage: _PickledStorage
    offset: int
    sizes: Shape
    strides: Shape


def _to_storage(pid: Any) -> _PickledStorage:
    kind, dtype, key, _device, _numel = pid
    if kind != "storage" or not isinstance(dtype, str) or dtype not in ITEMSIZE or not isinstance(key, str):
        raise ValueError(f"found a reference to {kind}, expected a storage with a known dtype")
    return _PickledStorage(dtype, key)


def _to_tensor(storage: Any, offset: Any, sizes: Any, strides: Any, *_rest: Any) -> _PickledTensor:
    numbers = (offset, *sizes, *strides)
    if not isinstance(storage, _PickledStorage) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise ValueError("it contains a tensor without a storage or with invalid sizes")
    if len(sizes) != len(strides):
        raise ValueError(f"found a tensor with {len(sizes)} sizes and {len(strides)} strides, expected equally many")
    return _PickledTensor(storage, offset, tuple(sizes), tuple(strides))


_STORAGE_DTYPES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
}  # fmt: skip
_ITEM_GLOBALS = {
    ("torch._utils", "_rebuild_tensor_v2"): _to_tensor,
    ("collections", "OrderedDict"): _empty_dict,
    **{("torch", f"{name}Storage"): dtype for name, dtype in _STORAGE_DTYPES.items()},
}


class DcpWriter:
    """Plan the files and the metadata of a DCP folder.

    Each file is written by one process. So a file has at most `output_files.RANGE_BYTES`, unless one item has more.
    """

    def __init__(self) -> None:
        # Imported here, because reading a folder needs no torch.
        from torch.distributed.checkpoint import metadata

        self._torch = metadata
        self.files: list[OutputFile] = []
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, Any] = {}

    @property
    def byte_items(self) -> list[str]:
        """Return the keys of the items that are not tensors."""
        return [key for key, entry in self._entries.items() if isinstance(entry, self._torch.BytesStorageMetadata)]

    @property
    def chunks(self) -> Iterator[tuple[str, Shape, Shape, str, int]]:
        """Yield (key of the tensor, offsets, sizes, file name, bytes that a loader reads) for each planned chunk."""
        for key, entry in self._entries.items():
            for chunk in entry.chunks if isinstance(entry, self._torch.TensorStorageMetadata) else ():
                info = self._storage[self._torch.MetadataIndex(key, chunk.offsets)]
                yield key, tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.length

    def add_chunk(self, spec: TensorSpec, offsets: Shape, sizes: Shape, slices: SliceList, start: int) -> None:
        """Add a chunk of a tensor to the last file.

        Args:
            spec: the full tensor.
            offsets, sizes: where the chunk is in the tensor. Its elements must be consecutive.
            slices: the elements of the full tensor.
            start: index of the chunk's first element in the tensor.
        """
        head, tail = _item_frame(spec.dtype, sizes)
        info = self._append(head, TensorData(slices, spec.dtype, start, math.prod(sizes)), tail)
        entry = self._entries.get(spec.name)
        if entry is None:
            entry = self._torch.TensorStorageMetadata(_properties(spec.dtype), _torch_size(spec.shape), [])
            self._entries[spec.name] = entry
        assert isinstance(entry, self._torch.TensorStorageMetadata)
        entry.chunks.append(self._torch.ChunkStorageMetadata(_torch_size(offsets), _torch_size(sizes)))
        self._storage[self._torch.MetadataIndex(spec.name, offsets)] = info

    def add_bytes(self, key: str, value: Any) -> None:
        """Add an item that is not a tensor, such as the iteration, to the last file."""
        import torch

        data = io.BytesIO()
        torch.save(value, data)
        self._entries[key] = self._torch.BytesStorageMetadata()
        self._storage[self._torch.MetadataIndex(key)] = self._append(data.getvalue())

    def _append(self, *contents: bytes | TensorData) -> Any:
        """Append an item to the last file, or to a new file if the last is full. Return torch's storage info for it."""
        from qwen3vl_bridge.upstream.dcp_storage import storage_info

        size = sum(map(len, contents))
        if not self.files or self.files[-1].nbytes + size > output_files.RANGE_BYTES:
            self.files.append(OutputFile(f"__0_{len(self.files)}.distcp", divisible=False))
        file = self.files[-1]
        info = storage_info(file.name, file.nbytes, size)
        for content in contents:
            if content:
                file.append(content)
        return info

    def write_metadata(self, folder: Path, path_of: Callable[[str], tuple[str, ...]], save_id: str) -> None:
        """Write the `.metadata` file of the folder.

        Args:
            folder: the folder with the files.
            path_of: function from the key of an item to the path of keys that leads to it in the nested state dict.
            save_id: identifies the save. The same value gives the same bytes.
        """
        from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

        metadata = self._torch.Metadata(
            self._entries,
            planner_data={key: path_of(key) for key in self._entries},
            storage_data=self._storage,
            storage_meta=self._torch.StorageMeta(save_id=str(uuid.uuid5(uuid.NAMESPACE_OID, save_id))),
            version=CURRENT_DCP_VERSION,
        )
        with (folder / METADATA).open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())


# Ten thousand experts have few different shapes. One object per shape keeps `.metadata`, and the memory to read it,
# small.
@cache
def _properties(dtype: str) -> TensorProperties:
    import torch
    from torch.distributed.checkpoint.metadata import TensorProperties

    return TensorProperties(dtype=getattr(torch, dtype))


@lru_cache(maxsize=1 << 12)
def _torch_size(numbers: Shape) -> torch.Size:
    import torch

    return torch.Size(numbers)


@lru_cache(maxsize=256)
def _item_frame(dtype: str, shape: Shape) -> tuple[bytes, bytes]:
    """Return the bytes that torch.save writes before and after the elements of a contiguous, non-empty tensor."""
    import torch

    with tempfile.NamedTemporaryFile() as file:
        with torch.serialization.skip_data():  # neither touches the tensor's memory nor uses disk space for it
            torch.save(torch.empty(shape, dtype=getattr(torch, dtype)), file)
        item = ByteRange(Path(file.name), 0, file.seek(0, os.SEEK_END))
        payload = find_payload(item, dtype, shape, "a sample")
        file.seek(0)
        head = file.read(payload.offset)
        file.seek(payload.offset + payload.length)
        return head, file.read()
