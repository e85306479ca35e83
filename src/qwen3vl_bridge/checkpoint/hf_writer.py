"""Writes sharded safetensors as a stream.

What lives here: which tensor goes to which shard at which byte, headers, the index. What may not: what tensors there
are (`plan.py`), the other files of a model (`hf_files.py`).

The whole layout is known before the first byte is written, so several processes can fill disjoint parts of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen3vl_bridge.checkpoint.hf_reader import INDEX, SINGLE
from qwen3vl_bridge.checkpoint.json_files import write_object
from qwen3vl_bridge.checkpoint.tensors import SAFETENSORS_OF_DTYPE, TensorSpec

MAX_SHARD_BYTES = 5_000_000_000
# Smaller than the blocks that come in, so that those go to the file without another copy.
_BUFFER = 1 << 16


@dataclass(frozen=True)
class Shard:
    """A file to be: its name, its header, its tensors in the order of their bytes, and its size."""

    name: str
    header: bytes
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(spec.nbytes for spec in self.tensors)


def layout(tensors: Sequence[TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[Shard, ...]:
    """Distribute tensors over files in their order; a tensor larger than a shard gets one of its own.

    Args:
        tensors: what to write.
        max_shard_bytes: payload of a file at most.
    """
    groups: list[list[TensorSpec]] = [[]]
    room = max_shard_bytes
    for spec in tensors:
        if groups[-1] and spec.nbytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(spec)
        room -= spec.nbytes
    if len(groups) == 1:
        return (_shard(SINGLE, groups[0]),)
    count = len(groups)
    return tuple(_shard(f"model-{i:05d}-of-{count:05d}.safetensors", group) for i, group in enumerate(groups, 1))


def _shard(name: str, tensors: list[TensorSpec]) -> Shard:
    # Wider elements first, as safetensors has it, so that every tensor is aligned to its element size.
    ordered = sorted(tensors, key=lambda spec: -(spec.nbytes // max(spec.numel, 1)))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in ordered:
        end = position + spec.nbytes
        dtype = SAFETENSORS_OF_DTYPE[spec.dtype]
        entries[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Shard(name, len(text).to_bytes(8, "little") + text, tuple(ordered))


def write_shard(folder: Path, shard: Shard, contents: Iterable[Iterable[memoryview]], *, sync: bool = True) -> None:
    """Write one file.

    Args:
        folder: an existing folder.
        shard: the file.
        contents: the bytes of each of its tensors.
        sync: whether to wait until it is on disk.

    Raises:
        AssertionError: a tensor has more or fewer bytes than it should.
    """
    with (folder / shard.name).open("xb", buffering=_BUFFER) as file:
        file.write(shard.header)
        for spec, blocks in zip(shard.tensors, contents, strict=True):
            written = sum(file.write(block) for block in blocks)
            if written != spec.nbytes:
                raise AssertionError(f"{spec.name}: {written} bytes written of {spec.nbytes}")
        file.flush()
        if sync:
            os.fdatasync(file.fileno())


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index of several files; for a single one there is none."""
    if len(shards) == 1:
        return
    weight_map = {spec.name: shard.name for shard in shards for spec in shard.tensors}
    numel = sum(spec.numel for shard in shards for spec in shard.tensors)
    size = sum(spec.nbytes for shard in shards for spec in shard.tensors)
    metadata = {"total_parameters": numel, "total_size": size}
    write_object(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
