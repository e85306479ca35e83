"""One tensor item of a `.distcp` file: a torch zip archive that contains the tensor's bytes unchanged."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple

from qwen3vl_bridge.checkpoint.formats.dcp.unpickling import restricted_loads
from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE, Extent, Shape
from qwen3vl_bridge.io.errors import CheckpointError

_LOCAL_HEADER = 30
_MAX_PICKLE = 1 << 20
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


class _Storage(NamedTuple):
    dtype: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    sizes: Shape
    strides: Shape


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
def open_item(item: Extent) -> Iterator[io.BufferedReader]:
    """An item as a separate file object.

    Raises:
        CheckpointError: the file cannot be opened or read.
    """
    try:
        with item.path.open("rb", buffering=0) as file:
            yield io.BufferedReader(Window(file, item.offset, item.length), 4096)
    except OSError as error:
        raise CheckpointError(f"{item.path}: {error.strerror or error}") from error


def find_payload(item: Extent, dtype: str, sizes: Shape, key: str) -> Extent:
    """Offsets of the bytes of an item's tensor.

    Args:
        item: the item.
        dtype: the tensor's dtype in the metadata.
        sizes: its shape in the metadata.
        key: its name, for errors.

    Raises:
        NotPlain: the item is readable, but its bytes are not simply the tensor's.
        CheckpointError: the item contains another tensor than the metadata says.
    """
    with open_item(item) as file:
        try:
            archive = zipfile.ZipFile(file)
        except OSError:
            raise
        except Exception as error:  # a damaged archive can fail in any way
            raise NotPlain(f"no zip archive: {error}") from error
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        tensor = _description(file, records, item, key)
        if (tensor.storage.dtype, tensor.sizes) != (dtype, sizes):
            raise CheckpointError(
                f"{item.path}, {key}: found {list(tensor.sizes)} {tensor.storage.dtype} at byte {item.offset}, "
                f"expected {list(sizes)} {dtype} by the metadata"
            )
        nbytes = math.prod(sizes) * ITEMSIZE[dtype]
        strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        if nbytes and any(s != t for s, t, n in zip(tensor.strides, strides, sizes, strict=True) if n > 1):
            raise NotPlain(f"strides {tensor.strides}, not contiguous")
        start, length = _place(file, records, f"data/{tensor.storage.key}", item)
        first = tensor.offset * ITEMSIZE[dtype]
        if first + nbytes > length:
            raise CheckpointError(f"{item.path}, {key}: found {length} bytes, expected {first + nbytes}")
        return Extent(item.path, item.offset + start + first, nbytes)


def check_uncompressed(file: BinaryIO) -> None:
    """Check that an item that is an archive is as long as its contents: a small one could unpack to any size.

    Args:
        file: the item; read from its beginning again afterwards.

    Raises:
        ValueError: a part of it is compressed, which torch never does.
    """
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
        if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
            raise ValueError("it is compressed, which torch never writes")
    file.seek(0)


def _place(file: BinaryIO, records: dict[str, zipfile.ZipInfo], name: str, item: Extent) -> tuple[int, int]:
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
    start, length = _place(file, records, name, item)
    if length > _MAX_PICKLE:
        raise NotPlain(f"record {name} has {length} bytes")
    file.seek(start)
    return file.read(length)


def _description(file: BinaryIO, records: dict[str, zipfile.ZipInfo], item: Extent, key: str) -> _Tensor:
    if "byteorder" in records and _bytes_of(file, records, "byteorder", item) != b"little":
        raise NotPlain("not little-endian")
    pickled = _bytes_of(file, records, "data.pkl", item)
    try:
        tensor = restricted_loads(pickled, f"{item.path}, {key}", _GLOBALS, _storage)
    except CheckpointError as error:
        raise NotPlain(str(error)) from error
    if not isinstance(tensor, _Tensor):
        raise NotPlain(f"a {type(tensor).__name__}")
    return tensor


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


_GLOBALS = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}
