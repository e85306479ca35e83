"""The folder of a Hugging Face model: finding it, reading and laying out safetensors, its other files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.formats.planned_files import Data, OutputFile, Task
from qwen3vl_bridge.checkpoint.formats.tensors import (
    DTYPE_OF_SAFETENSORS,
    ITEMSIZE,
    SAFETENSORS_OF_DTYPE,
    BlockScales,
    Extent,
    Slice,
    TensorSpec,
)
from qwen3vl_bridge.io.files import CheckpointError, expanded, file_size, read_object, resolve_within, write_object
from qwen3vl_bridge.io.parsing import parse_json
from qwen3vl_bridge.models.hf_config import fp8_block
from qwen3vl_bridge.registry import nearest_name
from qwen3vl_bridge.weights import fp8

from safetensors import SafetensorError, safe_open

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


_PATIENCE = 10  # seconds


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

    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hf_model, allow_patterns=patterns))
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:  # ValueError: of HF_ENDPOINT, on import
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        endpoint = f"; HF_ENDPOINT is {os.environ['HF_ENDPOINT']!r}" if "HF_ENDPOINT" in os.environ else ""
        raise CheckpointError(
            f"{hf_model} is neither a folder nor a model available from the hub: {reason}{endpoint}"
            f"{nearest_name(str(hf_model))}"
        ) from error


def is_path(model: str | Path) -> bool:
    """Whether a model is named by a path, which no name of the hub looks like."""
    return isinstance(model, Path) or model.startswith(("/", "./", "../", "~"))


def copy_of(hub_id: str) -> Path | None:
    """The folder of the hub's cache with a model's configuration, if there is one."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(hub_id, "config.json")
    except ValueError:  # no name of the hub
        return None
    return Path(found).parent if isinstance(found, str) else None


def hub_has(hub_id: str) -> bool:
    """Whether the hub, asked once, has a model of this name."""
    import httpx
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(hub_id, timeout=_PATIENCE)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
        return False
    return True


def side_files(folder: Path) -> list[Path]:
    """The files of a model's folder that are not weights and belong to it, as paths relative to `folder`, sorted."""
    found = (path.relative_to(folder) for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    patterns = (*_SIDE_FILES, _CODE) if _file_with_code(folder) else _SIDE_FILES
    return sorted(path for path in found if any(fnmatch(path.as_posix(), pattern) for pattern in patterns))


def copy_side_files(source: Path, destination: Path) -> list[Path]:
    """Copy configuration, tokenizer and processor files from a model's folder to another, created if need be; returns
    them, relative to the folder.
    """
    files = side_files(source)
    for relative in files:
        target = destination / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, target)
    return files


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, whose bytes begin at `offset`."""

    spec: TensorSpec
    path: Path
    offset: int


class HFWeights:
    """The tensors of a Hugging Face model's folder, as a `TensorSource`."""

    def __init__(self, folder: Path, file: str | None = None, *, dequantize: bool = True) -> None:
        """Read and check every header, of a folder's single file with all tensors or of a model; a CheckpointError if
        files are missing, truncated, or contradict each other. Without `dequantize` tensors in FP8 are e4m3 and scales.
        """
        self.folder = folder
        found = _read_folder(folder) if file is None else read_header(folder / file)
        self._stored = {stored.spec.name: stored for stored in found}
        self.specs = {name: stored.spec for name, stored in self._stored.items()}
        if dequantize and any(spec.dtype == fp8.E4M3 for spec in self.specs.values()):
            self.specs = dict(self._dequantized())

    @property
    def scales(self) -> dict[str, StoredTensor]:
        """The scales of the tensors in FP8, by their own names."""
        names = (name + fp8.SCALES for name, spec in self.specs.items() if spec.scales is not None)
        return {name: self._stored[name] for name in names}

    def _dequantized(self) -> Iterator[tuple[str, TensorSpec]]:
        """The tensors with those in FP8 as what they are read as, without their scales."""
        path = self.folder / "config.json"
        quantization = read_object(path).get("quantization_config")
        try:
            block = fp8_block(quantization)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        for name, spec in self.specs.items():
            of = self.specs.get(name.removesuffix(fp8.SCALES))
            if of is not spec and of is not None and of.dtype == fp8.E4M3:
                continue
            if spec.dtype != fp8.E4M3:
                yield name, spec
                continue
            scales = self._stored.get(name + fp8.SCALES)
            found = "nothing" if scales is None else scales.spec.describe()
            fits = None if scales is None or len(spec.shape) < 2 else fp8.block_of(spec.shape, scales.spec.shape, block)
            if scales is None or fits is None or scales.spec.dtype not in fp8.SCALE_DTYPES:
                raise CheckpointError(
                    f"{self.folder}, tensor {name} {spec.describe()}: found {found} as {name}{fp8.SCALES}, expected a "
                    f"scale for each {'matrix' if block is None else f'block of {block[0]} x {block[1]}'}, in "
                    f"{', '.join(fp8.SCALE_DTYPES)}"
                )
            extent = Extent(scales.path, scales.offset, scales.spec.nbytes)
            yield name, replace(spec, dtype="bfloat16", scales=BlockScales(extent, scales.spec.dtype, fits))

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """See `TensorSource`."""
        stored = self._stored[wanted.source]
        size = ITEMSIZE[stored.spec.dtype]
        yield Extent(stored.path, stored.offset + wanted.start * size, wanted.length * size)

    @property
    def files(self) -> list[Path]:
        """See `TensorSource`."""
        return sorted({stored.path for stored in self._stored.values()})


def has_weights(folder: Path) -> bool:
    """Whether a folder looks like one with a model's weights."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def _read_folder(folder: Path) -> list[StoredTensor]:
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


def read_header(path: Path, named_by: str = "its folder") -> list[StoredTensor]:
    """The tensors of one safetensors file, which `named_by` names; a CheckpointError if it is missing or damaged.

    safetensors itself checks the header against the file.
    """
    size = file_size(path, named_by)
    try:
        with safe_open(path, "np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} of {size} bytes: {error}; expected a whole safetensors file") from error
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        if (dtype := entry["dtype"]) not in DTYPE_OF_SAFETENSORS:
            raise CheckpointError(f"{path}, tensor {name}: dtype {dtype}, expected {', '.join(DTYPE_OF_SAFETENSORS)}")
        spec = TensorSpec(name, DTYPE_OF_SAFETENSORS[dtype], tuple(entry["shape"]))
        tensors.append(StoredTensor(spec, path, 8 + length + entry["data_offsets"][0]))
    return tensors


def shards(tasks: Sequence[Task], max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, list[Task]]:
    """Tensors by file, in their order; a tensor larger than a file's maximum payload gets its own."""
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


def write_index(folder: Path, files: Mapping[str, Sequence[Task]]) -> None:
    """Write the index of the files from `shards`; none for a single file."""
    if len(files) == 1:
        return
    weight_map = {task.target.name: name for name, tasks in files.items() for task in tasks}
    specs = [task.target for tasks in files.values() for task in tasks]
    metadata = {"total_parameters": sum(spec.numel for spec in specs), "total_size": sum(spec.nbytes for spec in specs)}
    write_object(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
