"""Lays out sharded safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.planned_files import Data, OutputFile, Task
from qwen3vl_bridge.checkpoint.formats.safetensors.reader import INDEX, SINGLE
from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE, SAFETENSORS_OF_DTYPE
from qwen3vl_bridge.io.json_files import write_object

MAX_SHARD_BYTES = 5_000_000_000


def shard_files(tasks: Sequence[Task], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[OutputFile]:
    """Distribute tensors over files in their order; a tensor larger than a shard gets its own.

    Args:
        tasks: the tensors.
        max_shard_bytes: maximum payload of a file.
    """
    return [one_file(name, group) for name, group in _shards(tasks, max_shard_bytes)]


def _shards(tasks: Sequence[Task], max_shard_bytes: int) -> Iterator[tuple[str, list[Task]]]:
    groups: list[list[Task]] = [[]]
    room = max_shard_bytes
    for task in tasks:
        if groups[-1] and task.target.nbytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(task)
        room -= task.target.nbytes
    for number, group in enumerate(groups, 1):
        yield SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors", group


def one_file(name: str, tasks: Sequence[Task]) -> OutputFile:
    """A file with tensors.

    Args:
        name: of the file.
        tasks: what to write.
    """
    # Wider elements first, as in safetensors, so that every tensor is aligned to its element size.
    ordered = sorted(tasks, key=lambda task: -ITEMSIZE[task.target.dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in (task.target for task in ordered):
        end = position + spec.nbytes
        dtype = SAFETENSORS_OF_DTYPE[spec.dtype]
        entries[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = OutputFile(name)
    file.append(len(text).to_bytes(8, "little") + text)
    for task in ordered:
        file.append(Data(task.segments, task.target.dtype, 0, task.target.numel))
    return file


def write_index(folder: Path, tasks: Sequence[Task], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the index of the files from `shard_files`; none for a single file."""
    shards = dict(_shards(tasks, max_shard_bytes))
    if len(shards) == 1:
        return
    weight_map = {task.target.name: name for name, group in shards.items() for task in group}
    numel = sum(task.target.numel for task in tasks)
    size = sum(task.target.nbytes for task in tasks)
    metadata = {"total_parameters": numel, "total_size": size}
    write_object(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
