"""Lays out torch.distributed.checkpoint folders: no process group, no tensor in memory."""

from __future__ import annotations

import io
import math
import os
import pickle
import tempfile
import uuid
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats import planned_files
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import FILE
from qwen3vl_bridge.checkpoint.formats.dcp_reader import find_payload
from qwen3vl_bridge.checkpoint.formats.planned_files import Data, OutputFile
from qwen3vl_bridge.checkpoint.formats.tensors import Extent, Segments, Shape, TensorSpec

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


class DcpLayout:
    """A folder to be written.

    A file has at most one unit of work, unless a single item has more, so no two processes share a file.
    """

    def __init__(self) -> None:
        self.files: list[OutputFile] = []
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    @property
    def byte_items(self) -> list[str]:
        """Keys of the items other than tensors."""
        return [key for key, entry in self._entries.items() if isinstance(entry, BytesStorageMetadata)]

    @property
    def chunks(self) -> Iterator[tuple[str, Shape, Shape, str, int]]:
        """For every box: its tensor's key, offsets and sizes, its file, and how many bytes a loader reads."""
        for key, entry in self._entries.items():
            for chunk in entry.chunks if isinstance(entry, TensorStorageMetadata) else ():
                info = self._storage[MetadataIndex(key, chunk.offsets)]
                yield key, tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.length

    def add_chunk(self, spec: TensorSpec, offsets: Shape, sizes: Shape, segments: Segments, start: int) -> None:
        """Add a box of a tensor: of the whole tensor's elements, those from number `start` on."""
        head, tail = _archive(spec.dtype, sizes)
        info = self._append(head, Data(segments, spec.dtype, start, math.prod(sizes)), tail)
        entry = self._entries.get(spec.name)
        if entry is None:
            properties = _properties(getattr(torch, spec.dtype))
            entry = self._entries[spec.name] = TensorStorageMetadata(properties, _size(spec.shape), [])
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(_size(offsets), _size(sizes)))
        self._storage[MetadataIndex(spec.name, offsets)] = info

    def add_bytes(self, key: str, value: Any) -> None:
        """Add an item other than a tensor."""
        data = io.BytesIO()
        torch.save(value, data)
        self._entries[key] = BytesStorageMetadata()
        self._storage[MetadataIndex(key)] = self._append(data.getvalue())

    def _append(self, *contents: bytes | Data) -> _StorageInfo:
        size = sum(map(len, contents))
        if not self.files or self.files[-1].nbytes + size > planned_files.UNIT_BYTES:
            self.files.append(OutputFile(f"__0_{len(self.files)}.distcp", divisible=False))
        file = self.files[-1]
        info = _StorageInfo(file.name, file.nbytes, size)
        for content in contents:
            if content:
                file.append(content)
        return info

    def write_metadata(self, folder: Path, path_of: Callable[[str], tuple[str, ...]], save_id: str) -> None:
        """Write `.metadata`; `path_of` gives keys' places in a nested state dict. Equal `save_id` give equal bytes."""
        metadata = Metadata(
            self._entries,
            planner_data={key: path_of(key) for key in self._entries},
            storage_data=self._storage,
            storage_meta=StorageMeta(save_id=str(uuid.uuid5(uuid.NAMESPACE_OID, save_id))),
            version=CURRENT_DCP_VERSION,
        )
        with (folder / FILE).open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())


# Ten thousand experts have few different shapes. One object per shape keeps `.metadata`, and the memory to read it,
# small.
@cache
def _properties(dtype: torch.dtype) -> TensorProperties:
    return TensorProperties(dtype=dtype)


@lru_cache(maxsize=1 << 12)
def _size(numbers: Shape) -> torch.Size:
    return torch.Size(numbers)


@lru_cache(maxsize=256)
def _archive(dtype: str, shape: Shape) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the bytes of a contiguous tensor, which is not empty."""
    with tempfile.NamedTemporaryFile() as file:
        with torch.serialization.skip_data():  # the tensor's memory is not accessed, and the file takes no room
            torch.save(torch.empty(shape, dtype=getattr(torch, dtype)), file)
        item = Extent(Path(file.name), 0, file.seek(0, os.SEEK_END))
        payload = find_payload(item, dtype, shape, "a sample")
        file.seek(0)
        head = file.read(payload.offset)
        file.seek(payload.offset + payload.length)
        return head, file.read()
