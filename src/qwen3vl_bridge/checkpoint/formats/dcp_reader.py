"""A torch.distributed.checkpoint folder as a source of tensors, for all writers and chunk sizes.

A tensor may be in tens of thousands of boxes, and a box in as many ranges, so complete lists of either are never made.
"""

from __future__ import annotations

import heapq
import io
import itertools
import math
import os
import pickle
import tempfile
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import IO, Any, BinaryIO, NamedTuple

from qwen3vl_bridge.checkpoint.formats.dcp_metadata import Chunk, DcpMetadata, restricted_loads
from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, Extent, Shape, Slice, TensorSpec
from qwen3vl_bridge.io.files import CheckpointError

_LOCAL_HEADER = 30
_MAX_PICKLE = 1 << 20


class DcpTensors:
    """Some tensors of a folder, under given names, as a `TensorSource`."""

    def __init__(self, metadata: DcpMetadata, keys: Mapping[str, str]) -> None:
        """Choose tensors: given name -> key in the folder.

        Raises:
            CheckpointError: the chunks of a tensor do not cover it exactly once, or two are the same item.
        """
        self.folder = metadata.folder
        specs, self._chunks = {}, {}
        for name, key in keys.items():
            spec, self._chunks[name] = metadata.tensors[key]
            specs[name] = TensorSpec(name, spec.dtype, spec.shape)
        self.specs: Mapping[str, TensorSpec] = specs
        self._spilled: IO[bytes] | None = None
        self._payloads: dict[Extent, Extent] = {}
        self._finding = Lock()  # several threads read
        self._tilings: dict[str, Tiling] = {}
        for name, spec in specs.items():
            try:
                self._tilings[name] = Tiling(spec.shape, [chunk[:2] for chunk in self._chunks[name]])
            except ValueError as error:
                raise CheckpointError(f"{self.folder}, tensor {name} {spec.shape}: {error}") from error
        owners: dict[tuple[Path, int], str] = {}
        for name, chunks in self._chunks.items():
            for path, offset, _ in (chunk.item for chunk in chunks):
                if (path, offset) in owners:
                    both = f"{owners[path, offset]} and of {name}"
                    raise CheckpointError(f"{path}: byte {offset} is a chunk of {both}, expected one of them")
                owners[path, offset] = name

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """See `TensorSource`.

        Raises:
            CheckpointError: an item is damaged or contains another tensor than the metadata says.
        """
        size, chunks = ITEMSIZE[self.specs[wanted.source].dtype], self._chunks[wanted.source]
        for block in self._tilings[wanted.source].blocks(wanted.start, wanted.length):
            payload = self._payload(wanted.source, chunks[block.box])
            yield Extent(payload.path, payload.offset + block.first * size, block.length * size)

    @property
    def files(self) -> list[Path]:
        """See `TensorSource`."""
        return sorted({chunk.item.path for chunks in self._chunks.values() for chunk in chunks})

    def drop(self, name: str) -> None:
        """See `TensorSource`."""
        self.specs = {key: spec for key, spec in self.specs.items() if key != name}

    def check(self, names: Iterable[str]) -> None:
        """See `TensorSource`."""
        for name in names:
            for chunk in self._chunks[name]:
                self._payload(name, chunk)

    def _payload(self, name: str, chunk: Chunk) -> Extent:
        with self._finding:
            found = self._payloads.get(chunk.item)
            if found is None:
                dtype = self.specs[name].dtype
                try:
                    found = find_payload(chunk.item, dtype, chunk.sizes, name)
                except NotPlain:
                    data = load_item(chunk.item, dtype, chunk.sizes, name)
                    found = self._spill(data, f"{chunk.item.path}, {name}")
                self._payloads[chunk.item] = found
            return found

    def _spill(self, data: memoryview, what: str) -> Extent:
        """Store the bytes of an item that cannot be read in place. All such items share one file."""
        try:
            if self._spilled is None:
                self._spilled = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as this
            start = self._spilled.seek(0, os.SEEK_END)
            self._spilled.write(data)
            self._spilled.flush()
        except OSError as error:
            raise CheckpointError(
                f"{what}: an archive of the old format, which has to be unpacked to {tempfile.gettempdir()}: "
                f"{error.strerror or error}"
            ) from error
        # The file has no name; it exists as long as it is open, and Linux provides a path for that time.
        return Extent(Path(f"/proc/self/fd/{self._spilled.fileno()}"), start, len(data))


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
    offsets: Shape
    sizes: Shape
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
        """Check the boxes, which are (offsets, sizes) inside the tensor; ValueError if an element is in none or two."""
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
        for group in self._groups:
            _check_disjoint(group, strides)
        # Disjoint and inside the tensor: they cover it if they have its number of elements.
        elements = sum(math.prod(box.sizes) for group in self._groups for box in group)
        if elements != math.prod(shape):
            raise ValueError(f"{elements} elements in chunks, expected {math.prod(shape)}")

    def blocks(self, start: int, length: int) -> Iterator[Block]:
        """Elements [start, start + length), in order."""
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
    return _Box(begin, end, number, offsets, sizes, sizes[:outer], strides[:outer], math.prod(sizes[outer:]))


def _check_disjoint(group: list[_Box], strides: Shape) -> None:
    begins = [box.begin for box in group]
    for i, box in enumerate(group):
        for other in group[i + 1 : bisect_left(begins, box.end)]:
            low = tuple(map(max, box.offsets, other.offsets))
            high = (
                min(o + s, p + t) for o, s, p, t in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            )
            if all(a < b for a, b in zip(low, high, strict=True)):
                element = sum(offset * stride for offset, stride in zip(low, strides, strict=True))
                raise ValueError(f"element {element} is in two chunks")


class NotPlain(Exception):
    """The item is not an archive with the tensor's bytes in order; loading it may still work."""


class Window(io.RawIOBase):
    """Part of a file as a separate file object."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Like that of any file."""
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if position < 0:
            raise ValueError(f"seek to {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        """Like that of any file, up to the end of the part."""
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextmanager
def _open_item(item: Extent) -> Iterator[io.BufferedReader]:
    try:
        with item.path.open("rb", buffering=0) as file:
            yield io.BufferedReader(Window(file, item.offset, item.length), 4096)
    except OSError as error:
        raise CheckpointError(f"{item.path}: {error.strerror or error}") from error


def find_payload(item: Extent, dtype: str, sizes: Shape, key: str) -> Extent:
    """Where the bytes of an item's tensor are: an item of a `.distcp` file is a torch zip archive.

    By the metadata the tensor has this dtype and shape; `key` is its name, for errors.

    Raises:
        NotPlain: the item is readable, but its bytes are not simply the tensor's.
        CheckpointError: the item contains another tensor than the metadata says.
    """
    with _open_item(item) as file:
        try:
            archive = zipfile.ZipFile(file)
        except OSError:
            raise
        except Exception as error:  # a damaged archive can fail in any way
            raise NotPlain(f"no zip archive: {error}") from error
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "byteorder" in records and _bytes_of(file, records, "byteorder", item) != b"little":
            raise NotPlain("not little-endian")
        pickled = _bytes_of(file, records, "data.pkl", item)
        try:
            tensor = restricted_loads(pickled, f"{item.path}, {key}", _GLOBALS, _storage)
        except CheckpointError as error:
            raise NotPlain(str(error)) from error
        if not isinstance(tensor, _Tensor):
            raise NotPlain(f"a {type(tensor).__name__}")
        if (tensor.storage.dtype, tensor.sizes) != (dtype, sizes):
            raise CheckpointError(
                f"{item.path}, {key}: found {list(tensor.sizes)} {tensor.storage.dtype} at byte {item.offset}, "
                f"expected {list(sizes)} {dtype} by the metadata"
            )
        nbytes = math.prod(sizes) * ITEMSIZE[dtype]
        strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        if nbytes and any(s != t for s, t, n in zip(tensor.strides, strides, sizes, strict=True) if n > 1):
            raise NotPlain(f"strides {tensor.strides}, not contiguous")
        start, length = _span_of(file, records, f"data/{tensor.storage.key}", item)
        first = tensor.offset * ITEMSIZE[dtype]
        if first + nbytes > length:
            raise CheckpointError(f"{item.path}, {key}: found {length} bytes, expected {first + nbytes}")
        return Extent(item.path, item.offset + start + first, nbytes)


def _span_of(file: BinaryIO, records: dict[str, zipfile.ZipInfo], name: str, item: Extent) -> tuple[int, int]:
    """Start of a record's bytes within the item, and their number."""
    info = records.get(name)
    if info is None or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
        raise NotPlain(f"no uncompressed record {name}")
    if not 0 <= info.header_offset < item.length:
        raise NotPlain(f"record {name} starts outside the item")
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\3\4":
        raise NotPlain(f"record {name} has no header")
    start = info.header_offset + _LOCAL_HEADER
    start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if start + info.file_size > item.length or info.compress_size != info.file_size:
        raise NotPlain(f"record {name} ends outside the item")
    return start, info.file_size


def _bytes_of(file: BinaryIO, records: dict[str, zipfile.ZipInfo], name: str, item: Extent) -> bytes:
    start, length = _span_of(file, records, name, item)
    if length > _MAX_PICKLE:
        raise NotPlain(f"record {name} has {length} bytes")
    file.seek(start)
    return file.read(length)


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
    if kind != "storage" or dtype not in ITEMSIZE or not isinstance(key, str):
        raise ValueError(f"reference to {kind}")
    return _Storage(dtype, key)


def _rebuild(storage: Any, offset: Any, sizes: Any, strides: Any, *_rest: Any) -> _Tensor:
    numbers = (offset, *sizes, *strides)
    if not isinstance(storage, _Storage) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise ValueError("a tensor of something else")
    if len(sizes) != len(strides) or len(sizes) > 32:
        raise ValueError(f"{len(sizes)} sizes and {len(strides)} strides")
    return _Tensor(storage, offset, tuple(sizes), tuple(strides))


_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}
_GLOBALS = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("collections", "OrderedDict"): dict,
    **{("torch", f"{name}Storage"): dtype for name, dtype in _DTYPES.items()},
}


def load_item(item: Extent, dtype: str, sizes: Shape, name: str) -> memoryview:
    """The bytes of an item's tensor that cannot be read in place, by torch's own restricted loader; as `find_payload`.

    Raises:
        CheckpointError: it cannot be loaded, or is another tensor than the metadata says.
    """
    import torch

    try:
        with _open_item(item) as file:
            # A small archive could unpack to any size.
            with suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
                if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                    raise ValueError("it is compressed, which torch never writes")
            file.seek(0)
            tensor = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            reason = "it is damaged, or calls for code"  # torch's own message advises to run that code
        where = f"{item.path}, {name}: the item at byte {item.offset}"
        raise CheckpointError(f"{where} cannot be read: {reason}") from error
    found = (str(tensor.dtype), tuple(tensor.shape)) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    if found != (f"torch.{dtype}", sizes):
        raise CheckpointError(f"{item.path}, {name}: found {found} at byte {item.offset}, expected {dtype} {sizes}")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
