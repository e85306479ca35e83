"""A torch.distributed.checkpoint folder as a source of tensors, for all writers and chunk sizes."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import IO

from qwen3vl_bridge.checkpoint.formats.dcp.boxes import Tiling
from qwen3vl_bridge.checkpoint.formats.dcp.items import NotPlain, check_uncompressed, find_payload, open_item
from qwen3vl_bridge.checkpoint.formats.dcp.metadata import Chunk, DcpMetadata
from qwen3vl_bridge.checkpoint.formats.slices import Slice
from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE, Extent, TensorSpec
from qwen3vl_bridge.io.errors import CheckpointError


class DcpTensors:
    """Some tensors of a folder, under given names.

    Attributes:
        folder: the folder.
        specs: the tensors by name.
    """

    def __init__(self, metadata: DcpMetadata, keys: Mapping[str, str]) -> None:
        """Choose tensors.

        Args:
            metadata: contents of the folder.
            keys: given name -> key in the folder.

        Raises:
            CheckpointError: the chunks of a tensor do not cover it exactly once.
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
        self._tilings = {name: self._tiling(name) for name in specs}
        self._check_items()

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """Byte ranges of the elements of a run.

        Raises:
            CheckpointError: an item is damaged or contains another tensor than the metadata says.
        """
        size, chunks = ITEMSIZE[self.specs[wanted.source].dtype], self._chunks[wanted.source]
        for block in self._tilings[wanted.source].blocks(wanted.start, wanted.length):
            payload = self._payload(wanted.source, chunks[block.box])
            yield Extent(payload.path, payload.offset + block.first * size, block.length * size)

    @property
    def files(self) -> list[Path]:
        """The files that contain the tensors."""
        return sorted({chunk.item.path for chunks in self._chunks.values() for chunk in chunks})

    def drop(self, name: str) -> None:
        """Remove a tensor from the source."""
        self.specs = {key: spec for key, spec in self.specs.items() if key != name}

    def check(self, names: Iterable[str]) -> None:
        """Find the bytes of some tensors.

        Raises:
            CheckpointError: an item is damaged or contains another tensor than the metadata says.
        """
        for name in names:
            for chunk in self._chunks[name]:
                self._payload(name, chunk)

    def _check_items(self) -> None:
        """Check that no two chunks are the same item."""
        owners: dict[tuple[Path, int], str] = {}
        for name, chunks in self._chunks.items():
            for path, offset, _ in (chunk.item for chunk in chunks):
                if (path, offset) in owners:
                    both = f"{owners[path, offset]} and of {name}"
                    raise CheckpointError(f"{path}: byte {offset} is a chunk of {both}, expected one of them")
                owners[path, offset] = name

    def _tiling(self, name: str) -> Tiling:
        try:
            return Tiling(self.specs[name].shape, [chunk[:2] for chunk in self._chunks[name]])
        except ValueError as error:
            raise CheckpointError(f"{self.folder}, tensor {name} {self.specs[name].shape}: {error}") from error

    def _payload(self, name: str, chunk: Chunk) -> Extent:
        with self._finding:
            found = self._payloads.get(chunk.item)
            if found is None:
                found = self._payloads[chunk.item] = self._find(name, chunk)
            return found

    def _find(self, name: str, chunk: Chunk) -> Extent:
        dtype = self.specs[name].dtype
        try:
            return find_payload(chunk.item, dtype, chunk.sizes, name)
        except NotPlain:
            return self._spill(load_item(chunk.item, dtype, chunk.sizes, name), f"{chunk.item.path}, {name}")

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


def load_item(item: Extent, dtype: str, sizes: tuple[int, ...], name: str) -> memoryview:
    """Load an item that cannot be read in place, with torch's own restricted loader.

    Args:
        item: the item.
        dtype: its dtype in the metadata.
        sizes: its shape in the metadata.
        name: the tensor's name, for errors.

    Returns:
        The tensor's bytes.

    Raises:
        CheckpointError: it cannot be loaded, or is another tensor than the metadata says.
    """
    import torch

    try:
        with open_item(item) as file:
            check_uncompressed(file)
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
