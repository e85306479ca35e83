"""Writes torch.distributed.checkpoint folders as a stream: no process group, no tensor in memory.

What lives here: data files and `.metadata`. What may not: which keys there are (`importing.py`).

Every writing process has a rank of its own and returns what it wrote as a `DcpPart`; one of them joins the parts.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from qwen3vl_bridge.checkpoint.dcp_metadata import FILE
from qwen3vl_bridge.checkpoint.dcp_template import template
from qwen3vl_bridge.checkpoint.tensors import Shape, TensorSpec

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

_MAX_FILE = 4 << 30
# Smaller than the blocks that come in, so that those go to the file without another copy.
_BUFFER = 1 << 16


@dataclass
class DcpPart:
    """What one process wrote."""

    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    byte_items: list[str] = field(default_factory=list)
    storage: list[tuple[str, Shape | None, _StorageInfo]] = field(default_factory=list)


class DcpWriter:
    """Writes the data files of one process."""

    def __init__(self, folder: Path, rank: int = 0, *, max_file_bytes: int = _MAX_FILE, sync: bool = True) -> None:
        """Start writing.

        Args:
            folder: an existing folder.
            rank: number of this process; distinct for each.
            max_file_bytes: a file that is longer is not continued.
            sync: whether to wait until each file is on disk.
        """
        self.part = DcpPart()
        self._folder, self._rank, self._max, self._sync = folder, rank, max_file_bytes, sync
        self._file: BinaryIO | None = None
        self._files = 0

    def __enter__(self) -> DcpWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            with contextlib.suppress(OSError):  # such as a full disk, which is the exception already
                self._file.close()

    def close(self) -> None:
        """Finish the open file."""
        if self._file is not None:
            self._file.flush()
            if self._sync:
                os.fdatasync(self._file.fileno())
            self._file.close()
            self._file = None

    def write_chunk(self, spec: TensorSpec, offsets: Shape, sizes: Shape, blocks: Iterable[memoryview]) -> None:
        """Write a box of a tensor.

        Args:
            spec: the whole tensor, by its key.
            offsets: where in it the box begins.
            sizes: the box.
            blocks: its bytes.

        Raises:
            AssertionError: there are more or fewer bytes than the box has.
        """
        frame = template(spec.dtype, sizes)
        file, start = self._open()
        file.write(frame.head)
        written = sum(file.write(block) for block in blocks)
        if written != frame.nbytes or frame.nbytes != math.prod(sizes) * getattr(torch, spec.dtype).itemsize:
            raise AssertionError(f"{spec.name}, chunk {sizes} at {offsets}: {written} bytes of {frame.nbytes}")
        file.write(frame.tail)
        entry = self.part.tensors.get(spec.name)
        if entry is None:
            properties = TensorProperties(dtype=getattr(torch, spec.dtype))
            entry = self.part.tensors[spec.name] = TensorStorageMetadata(properties, torch.Size(spec.shape), [])
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        self._note(spec.name, offsets, start)

    def write_bytes(self, key: str, value: Any) -> None:
        """Write an item that is no tensor."""
        file, start = self._open()
        data = io.BytesIO()
        torch.save(value, data)
        file.write(data.getbuffer())
        self.part.byte_items.append(key)
        self._note(key, None, start)

    def _open(self) -> tuple[BinaryIO, int]:
        if self._file is not None and self._file.tell() >= self._max:
            self.close()
        file = self._file
        if file is None:
            self._name = f"__{self._rank}_{self._files}.distcp"
            file = self._file = (self._folder / self._name).open("xb", buffering=_BUFFER)
            self._files += 1
        return file, file.tell()

    def _note(self, key: str, offsets: Shape | None, start: int) -> None:
        assert self._file is not None
        self.part.storage.append((key, offsets, _StorageInfo(self._name, start, self._file.tell() - start)))


def write_metadata(folder: Path, parts: Iterable[DcpPart], paths: dict[str, tuple[str, ...]]) -> None:
    """Join what every process wrote.

    Args:
        folder: where the data files are.
        parts: of all processes.
        paths: for a key, where in a nested state dict it belongs; the key itself where it is not given.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for part in parts:
        for key, tensor in part.tensors.items():
            known = entries.setdefault(key, TensorStorageMetadata(tensor.properties, tensor.size, []))
            assert isinstance(known, TensorStorageMetadata)
            known.chunks.extend(tensor.chunks)
        entries.update((key, BytesStorageMetadata()) for key in part.byte_items)
        storage.update((MetadataIndex(key, offsets), info) for key, offsets, info in part.storage)
    metadata = Metadata(
        entries,
        planner_data={key: paths.get(key, (key,)) for key in entries},
        storage_data=storage,
        storage_meta=StorageMeta(save_id=str(uuid.uuid4())),
        version=CURRENT_DCP_VERSION,
    )
    with (folder / FILE).open("xb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())
