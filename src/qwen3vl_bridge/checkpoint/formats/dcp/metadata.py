"""The `.metadata` file of a torch.distributed.checkpoint folder, checked and as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from qwen3vl_bridge.checkpoint.formats.dcp.unpickling import Record, restricted_loads
from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE, Extent, Shape, TensorSpec
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.io.paths import file_size, read_whole, resolve_within

FILE = ".metadata"
_MAX_DIMENSIONS, _MAX_BYTES = 32, 1 << 31


class Chunk(NamedTuple):
    """A box of a tensor, and the item that contains it."""

    offsets: Shape
    sizes: Shape
    item: Extent


@dataclass
class DcpMetadata:
    """Contents of a folder.

    Attributes:
        folder: the folder.
        tensors: (description, chunks) by key.
        byte_items: items other than tensors, by key.
    """

    folder: Path
    tensors: dict[str, tuple[TensorSpec, tuple[Chunk, ...]]] = field(default_factory=dict)
    byte_items: dict[str, Extent] = field(default_factory=dict)


def read_metadata(folder: Path) -> DcpMetadata:
    """Read and check `folder/.metadata`.

    Raises:
        CheckpointError: it is missing, damaged, requires code, contradicts itself, or names missing files.
    """
    path = folder / FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a torch.distributed.checkpoint folder: it has no {FILE}")
    try:
        data = read_whole(path, _MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    if not data:
        raise CheckpointError(f"{path} is empty, expected torch.distributed.checkpoint Metadata")
    top = restricted_loads(data, str(path))
    if not isinstance(top, Record) or top.kind != "Metadata":
        raise CheckpointError(f"{path} holds a {_kind(top)}, expected torch.distributed.checkpoint Metadata")
    return _Checker(folder, path).check(top)


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Record) else type(value).__name__


def _shown(value: Any) -> str:
    """A value as text. Only plain values are printed, because a file's nested values may be endless."""
    if isinstance(value, tuple) and all(isinstance(entry, int) for entry in value):
        return str(value[:_MAX_DIMENSIONS])
    return str(value)[:120] if isinstance(value, (str, int, float, type(None))) else _kind(value)


class _Checker:
    def __init__(self, folder: Path, path: Path) -> None:
        self.folder = folder
        self.path = path
        self.sizes: dict[str, tuple[Path, int]] = {}

    def check(self, top: Record) -> DcpMetadata:
        entries = self.expect(top.field("state_dict_metadata"), dict, "state_dict_metadata")
        storage = self.expect(top.field("storage_data"), dict, "storage_data")
        places: dict[tuple[str, Shape | None], Any] = {}
        for index, info in storage.items():
            self.expect_record(index, "MetadataIndex", "storage_data")
            key, offset = self.expect(index.field("fqn"), str, "storage_data"), index.field("offset")
            places[key, offset if offset is None else self.numbers(offset, f"{key}, storage_data")] = info
        result = DcpMetadata(self.folder)
        for key, entry in entries.items():
            self.expect(key, str, "a key")
            if _kind(entry) == "BytesStorageMetadata":
                result.byte_items[key] = self.item(places.get((key, None)), key)
            else:
                result.tensors[key] = self.tensor(key, entry, places)
        return result

    def fail(self, where: str, found: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}, {where}: found {_shown(found)}, expected {expected}")

    def expect(self, value: Any, kind: type, where: str) -> Any:
        if not isinstance(value, kind):
            raise self.fail(where, _kind(value), kind.__name__)
        return value

    def expect_record(self, value: Any, kind: str, where: str) -> Record:
        if not isinstance(value, Record) or value.kind != kind:
            raise self.fail(where, _kind(value), kind)
        return value

    def numbers(self, value: Any, where: str) -> Shape:
        whole = isinstance(value, tuple) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
        if not whole or len(value) > _MAX_DIMENSIONS:
            raise self.fail(where, value, "a tuple of whole numbers")
        return value

    def tensor(self, key: str, entry: Any, places: dict) -> tuple[TensorSpec, tuple[Chunk, ...]]:
        self.expect_record(entry, "TensorStorageMetadata", key)
        properties = self.expect_record(entry.field("properties"), "TensorProperties", key).state
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise self.fail(key, dtype, "a dtype")
        spec = TensorSpec(key, dtype, self.numbers(entry.field("size"), f"{key}, size"))
        chunks = self.expect(entry.field("chunks"), list, f"{key}, chunks")
        return spec, tuple(self.chunk(spec, chunk, places) for chunk in chunks)

    def chunk(self, spec: TensorSpec, chunk: Any, places: dict) -> Chunk:
        self.expect_record(chunk, "ChunkStorageMetadata", spec.name)
        offsets = self.numbers(chunk.field("offsets"), f"{spec.name}, chunk offsets")
        sizes = self.numbers(chunk.field("sizes"), f"{spec.name}, chunk sizes")
        in_range = len(offsets) == len(sizes) == len(spec.shape) and all(
            offset + size <= whole for offset, size, whole in zip(offsets, sizes, spec.shape, strict=True)
        )
        if not in_range:
            raise self.fail(spec.name, f"a chunk of {sizes} at {offsets}", f"one inside {spec.shape}")
        item = self.item(places.get((spec.name, offsets)), f"{spec.name}, chunk at {list(offsets)}")
        if item.length < math.prod(sizes) * ITEMSIZE[spec.dtype]:
            raise self.fail(spec.name, f"{item.length} bytes for a chunk of {sizes}", f"room for {spec.dtype}")
        return Chunk(offsets, sizes, item)

    def item(self, info: Any, where: str) -> Extent:
        self.expect_record(info, "_StorageInfo", where)
        if info.field("transform_descriptors"):
            raise self.fail(where, "one that is transformed", "an item stored as it is")
        relative = self.expect(info.field("relative_path"), str, f"{where}, file")
        offset, length = self.numbers((info.field("offset"), info.field("length")), f"{where}, place")
        if relative not in self.sizes:
            path = resolve_within(self.folder, relative, f"{self.path}, {where}")
            self.sizes[relative] = path, file_size(path, f"{self.path}, {where}")
        path, size = self.sizes[relative]
        if offset + length > size:
            raise CheckpointError(f"{path} has {size} bytes, expected {offset + length} at least, for {where}")
        return Extent(path, offset, length)
