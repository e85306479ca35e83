"""The folder of a Hugging Face model: finding it, reading and laying out safetensors, its other files."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from qwen3vl_bridge.checkpoint.formats.planned_files import Data, OutputFile, Task
from qwen3vl_bridge.checkpoint.formats.tensors import (
    DTYPE_OF_SAFETENSORS,
    ITEMSIZE,
    SAFETENSORS_OF_DTYPE,
    Extent,
    Slice,
    TensorSpec,
)
from qwen3vl_bridge.io.files import CheckpointError, expanded, file_size, read_object, resolve_within, write_object
from qwen3vl_bridge.io.parsing import parse_json

# Name of the Hugging Face format in manifests and reports.
HUGGINGFACE = "huggingface"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000

# Files that from_pretrained of a model, a tokenizer or a processor may look for, except weights.
_SIDE_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template*", "additional_chat_templates/*"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)
# Code of a model; its JSON files then have an `auto_map`, which names it.
_CODE = "*.py"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

# safetensors itself refuses longer headers, and deeper ones. It counts in 64 bits.
_MAX_HEADER, _MAX_DEPTH, _U64 = 100_000_000, 127, 1 << 64

# What a folder holds if it has a file of one of these names; the first that fits.
_KINDS = (
    (
        ("adapter_config.json",),
        "adapters in peft's form (adapter_config.json): peft and vLLM load them onto their base model, and peft's "
        "merge_and_unload() makes a whole model of both, which can be trained, converted and asked",
    ),
    (
        (".metadata", "latest_checkpointed_iteration.txt", "latest_train_state.pt"),
        "a Megatron checkpoint, of which `qwen3vl convert export` makes a Hugging Face model; configuration and "
        "processor are in the iteration's folder hf",
    ),
    (("*.distcp",), "files of a Megatron checkpoint without .metadata, whose save was not completed"),
    ((SINGLE, INDEX), "a Hugging Face model, of which `qwen3vl convert import` makes a Megatron checkpoint"),
    (
        ("pytorch_model*.bin", "consolidated*.pth"),
        "weights pickled by torch; from_pretrained and save_pretrained of transformers write them as safetensors",
    ),
    (("*.gguf",), "weights for llama.cpp; give the model that they were made from"),
    (("config.json",), "a configuration without weights"),
    (("tokenizer*", "*processor_config.json"), "a tokenizer or processor without a model"),
)


def contents_of(path: Path) -> str:
    """What a path holds, as the end of a message, such as "it holds a configuration without weights"."""
    if not path.is_dir():
        return "it is a file, not a folder" if path.exists() else "there is no such folder"
    for patterns, kind in _KINDS:
        if any(True for pattern in patterns for _ in path.glob(pattern)):
            return f"it holds {kind}"
    names = sorted(entry.name for entry in path.iterdir())
    return f"it holds {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}" if names else "it is empty"


def find_model(hf_model: str | Path, *, weights: bool = True, trust_remote_code: bool = False) -> Path:
    """The local folder of a model, downloaded from the hub if it is not a folder.

    Args:
        hf_model: a folder, or a hub id such as `Qwen/Qwen3-VL-2B-Instruct`.
        weights: whether the weights are needed too.
        trust_remote_code: whether the model may contain code. It is copied then, never run here.

    Raises:
        CheckpointError: it is neither, or contains code that is not trusted.
    """
    folder = expanded(hf_model)
    if not folder.is_dir():
        folder = _downloaded(hf_model, [*_SIDE_FILES, _CODE, *(_WEIGHT_FILES if weights else ())])
    if (name := _file_with_code(folder)) and not trust_remote_code:
        raise CheckpointError(
            f"{folder / name} refers to code in the model's folder (auto_map); --trust-remote-code copies it"
        )
    return folder


def _file_with_code(folder: Path) -> str | None:
    """The file that refers to the model's own code, None if none does."""
    for path in sorted(folder.glob("*config.json")):
        if path.is_file() and "auto_map" in read_object(path):
            return path.name
    return None


def _downloaded(hf_model: str | Path, patterns: list[str]) -> Path:
    if expanded(hf_model).exists():
        raise CheckpointError(f"{hf_model} is a file, expected a folder with config.json and *.safetensors")
    if isinstance(hf_model, Path) or not _HUB_ID.fullmatch(hf_model):
        raise CheckpointError(f"{hf_model} does not exist, expected a folder with config.json and *.safetensors")
    import httpx

    def no_address(endpoint: str | None, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{hf_model} is not a folder, and HF_ENDPOINT is {endpoint!r}, expected the URL of a hub: {error}"
        )

    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ValueError as error:  # it parses its endpoint URL when it is imported
        raise no_address(os.environ.get("HF_ENDPOINT"), error) from error
    try:
        return Path(snapshot_download(hf_model, allow_patterns=patterns))
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise no_address(constants.ENDPOINT, error) from error
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{hf_model} is neither a folder nor a model available from the hub: {reason}") from error


def side_files(folder: Path) -> list[Path]:
    """The files of a model's folder that are not weights and belong to it, as paths relative to `folder`, sorted."""
    found = (path.relative_to(folder) for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    patterns = (*_SIDE_FILES, _CODE) if _file_with_code(folder) else _SIDE_FILES
    return sorted(path for path in found if any(fnmatch(path.as_posix(), pattern) for pattern in patterns))


def copy_side_files(source: Path, destination: Path) -> list[Path]:
    """Copy configuration, tokenizer and processor files from a model's folder to another, created if need be.

    Returns:
        The copied files, relative to the folder; never weights.
    """
    files = side_files(source)
    for relative in files:
        target = destination / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, target)
    return files


class _Stored(NamedTuple):
    """A tensor of a safetensors file, at bytes [offset, end)."""

    spec: TensorSpec
    path: Path
    offset: int
    end: int


class HFWeights:
    """The tensors of a Hugging Face model's folder, as a `TensorSource`."""

    def __init__(self, folder: Path, file: str | None = None) -> None:
        """Read and check every header: of a folder's single file with all tensors, or of a model.

        Raises:
            CheckpointError: files are missing, truncated, contradict each other or their headers are wrong.
        """
        self.folder = folder
        found = _read_folder(folder) if file is None else read_header(folder / file)
        self._stored = {stored.spec.name: stored for stored in found}
        self.specs: Mapping[str, TensorSpec] = {name: stored.spec for name, stored in self._stored.items()}

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """See `TensorSource`."""
        stored = self._stored[wanted.source]
        size = ITEMSIZE[stored.spec.dtype]
        yield Extent(stored.path, stored.offset + wanted.start * size, wanted.length * size)

    @property
    def files(self) -> list[Path]:
        """See `TensorSource`."""
        return sorted({stored.path for stored in self._stored.values()})

    def check(self, names: Iterable[str]) -> None:
        """Does nothing: all was checked when the headers were read."""

    def drop(self, name: str) -> None:
        """See `TensorSource`."""
        self._stored.pop(name)
        self.specs = {key: spec for key, spec in self.specs.items() if key != name}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())


def has_weights(folder: Path) -> bool:
    """Whether a folder looks like one with a model's weights."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def _read_folder(folder: Path) -> list[_Stored]:
    # A single file has precedence over an index, as in transformers.
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not index.exists():
        raise CheckpointError(f"{folder} has no weights, expected {SINGLE} or {INDEX}; {contents_of(folder)}")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map, expected {{tensor: file}}")
    files: dict[Path, set[str]] = {}
    for name, relative in weight_map.items():
        files.setdefault(resolve_within(folder, relative, f"{index}, tensor {name}"), set()).add(name)
    tensors = []
    for path, names in sorted(files.items()):
        shard = read_header(path, named_by=index.name)
        held = {stored.spec.name for stored in shard}
        for kind, different in (("lacks", names - held), ("also holds", held - names)):
            if different:
                some = ", ".join(sorted(different)[:5]) + (" ..." if len(different) > 5 else "")
                raise CheckpointError(f"{path} {kind} {len(different)} tensors against {index.name}: {some}")
        tensors += shard
    return tensors


def read_header(path: Path, named_by: str = "its folder") -> list[_Stored]:
    """The tensors of one safetensors file in the order of their bytes; its header is checked against the file.

    Raises:
        CheckpointError: the file, which `named_by` names, is missing, truncated, or its header is wrong.
    """
    size = file_size(path, named_by)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                found = f"a header of {length} bytes in a file of {size}"
                raise CheckpointError(f"{path}: found {found}, expected a whole safetensors file")
            header = _parsed(file.read(length), f"{path}: its header")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    metadata = header.pop("__metadata__", None)
    texts = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not texts:
        raise CheckpointError(f"{path}: __metadata__ is {str(metadata)[:80]}, expected an object of texts")
    position = 8 + length
    tensors = [_entry(path, name, entry, position) for name, entry in header.items()]
    tensors.sort(key=lambda stored: (stored.offset, stored.end))
    for stored in tensors:
        if stored.offset != position:
            raise CheckpointError(
                f"{path}, tensor {stored.spec.name}: starts at byte {stored.offset}, expected {position}, "
                "where the tensor before it ends"
            )
        position = stored.end
    if position != size:
        raise CheckpointError(f"{path} has {size} bytes, expected {position} by its header")
    return tensors


def _parsed(text: bytes, what: str) -> dict[str, Any]:
    """Parse a header like safetensors' own parser, which is stricter in some respects than Python's."""

    def integer(digits: str) -> int | float:  # it reads minus zero, and numbers with too many digits, as fractions
        value = int(digits)
        return float(digits) if digits == "-0" or not -_U64 < value < _U64 else value

    try:
        header = parse_json(text, max_depth=_MAX_DEPTH, parse_int=integer)
        if b"\\u" in text:  # may contain half a surrogate pair, which is not valid text
            json.dumps(header, ensure_ascii=False).encode()
    except ValueError as error:
        raise CheckpointError(f"{what} cannot be read as JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{what} is a JSON {type(header).__name__}, expected an object")
    return header


def _entry(path: Path, name: str, entry: Any, data: int) -> _Stored:
    """One tensor of a header, whose offsets count from byte `data` of the file."""
    where = f"{path}, tensor {name}"
    if not isinstance(entry, dict) or {"dtype", "shape", "data_offsets"} - set(entry):
        raise CheckpointError(f"{where}: header entry {str(entry)[:80]}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_OF_SAFETENSORS:
        raise CheckpointError(f"{where}: dtype {str(dtype)[:80]}, expected one of {', '.join(DTYPE_OF_SAFETENSORS)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise CheckpointError(f"{where}: shape {str(shape)[:80]}, offsets {str(offsets)[:80]}, expected numbers")
    if len(offsets) != 2:
        raise CheckpointError(f"{where}: {len(offsets)} offsets, expected 2")
    if any(count >= _U64 for count in itertools.accumulate(shape, mul)):
        raise CheckpointError(f"{where}: shape {str(shape)[:80]} has more elements than can be counted")
    spec = TensorSpec(name, DTYPE_OF_SAFETENSORS[dtype], tuple(shape))
    if offsets[1] - offsets[0] != spec.nbytes:
        found = f"data_offsets {offsets} hold {offsets[1] - offsets[0]} bytes"
        raise CheckpointError(f"{where}: {found}, expected {spec.nbytes} for {dtype} {shape}")
    return _Stored(spec, path, data + offsets[0], data + offsets[1])


def shard_files(tasks: Sequence[Task], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[OutputFile]:
    """Distribute tensors over files in their order; a tensor larger than a shard's maximum payload gets its own."""
    return [one_file(name, group) for name, group in _shards(tasks, max_shard_bytes).items()]


def _shards(tasks: Sequence[Task], max_shard_bytes: int) -> dict[str, list[Task]]:
    groups: list[list[Task]] = [[]]
    room = max_shard_bytes
    for task in tasks:
        if groups[-1] and task.target.nbytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(task)
        room -= task.target.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def one_file(name: str, tasks: Sequence[Task]) -> OutputFile:
    """A file of this name with tensors."""
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
    shards = _shards(tasks, max_shard_bytes)
    if len(shards) == 1:
        return
    weight_map = {task.target.name: name for name, group in shards.items() for task in group}
    numel = sum(task.target.numel for task in tasks)
    size = sum(task.target.nbytes for task in tasks)
    metadata = {"total_parameters": numel, "total_size": size}
    write_object(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
