"""The folder of a Hugging Face model: find it, read and plan its safetensors files, and copy its other files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.formats.output_files import OutputFile, Task, TensorData
from qwen3vl_bridge.checkpoint.formats.tensors import (
    DTYPE_OF_SAFETENSORS,
    ITEMSIZE,
    SAFETENSORS_OF_DTYPE,
    BlockScales,
    ByteRange,
    TensorSpec,
)
from qwen3vl_bridge.config.hf_config import fp8_block
from qwen3vl_bridge.core.files import (
    CheckpointError,
    expanded,
    file_size,
    parse_json,
    read_object,
    resolve_within,
    write_object,
)
from qwen3vl_bridge.registry import nearest_name
from qwen3vl_bridge.weights import fp8
from qwen3vl_bridge.weights.rows import TensorSlice

from safetensors import SafetensorError, safe_open

# Name of the Hugging Face format in manifests and reports.
HUGGINGFACE = "huggingface"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000

# Files other than weights that from_pretrained of a model, a tokenizer or a processor may read.
_SIDE_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template*", "additional_chat_templates/*"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)
# The model's own code. Its JSON files then have an `auto_map` that names it.
_CODE = "*.py"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

# (file names, description) of what a folder may contain. The first match counts.
_KINDS = (
    (
        ("adapter_config.json",),
        "adapters in the format of peft (adapter_config.json): peft and vLLM load them with their base model; peft's "
        "merge_and_unload() merges both into a complete model, which can be trained and converted",
    ),
    (
        (".metadata", "latest_checkpointed_iteration.txt", "latest_train_state.pt"),
        "a Megatron checkpoint; `qwen3vl convert export` writes it as a Hugging Face model. Configuration and "
        "processor are in the iteration's folder hf",
    ),
    (("*.distcp",), "files of a Megatron checkpoint without .metadata: its save was not completed"),
    ((SINGLE, INDEX), "a Hugging Face model; `qwen3vl convert import` writes it as a Megatron checkpoint"),
    (
        ("*.safetensors",),
        f"weights without {INDEX}, which lists the tensors of each file: download it too, or save the model again",
    ),
    (
        ("pytorch_model*.bin", "consolidated*.pth"),
        "weights pickled by torch; write them as safetensors with from_pretrained and save_pretrained of transformers",
    ),
    (("*.gguf",), "weights for llama.cpp; use the model that they were made from"),
    (("config.json",), "a configuration without weights"),
    (("tokenizer*", "*processor_config.json"), "a tokenizer or processor without a model"),
)


def describe_contents(path: Path) -> str:
    """Return text such as "it holds a configuration without weights" for the end of an error about a path."""
    if not path.is_dir():
        return "it is a file, not a folder" if path.exists() else "there is no such folder"
    for patterns, kind in _KINDS:
        if any(True for pattern in patterns for _ in path.glob(pattern)):
            return f"it holds {kind}"
    names = sorted(entry.name for entry in path.iterdir())
    return f"it holds {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}" if names else "it is empty"


_HUB_TIMEOUT_SECONDS = 10


def find_model(hf_model: str | Path, *, weights: bool = True, trust_remote_code: bool = False) -> Path:
    """Return the local folder of a model. Download the model from the hub if it is not a folder.

    Args:
        hf_model: a folder, or a hub id such as `Qwen/Qwen3-VL-2B-Instruct`.
        weights: whether to download the weights too.
        trust_remote_code: whether the model may contain code. Code is only copied, never run here.

    Raises:
        CheckpointError: the model does not exist, or contains code that is not trusted.
    """
    folder = expanded(hf_model)
    if not folder.is_dir():
        folder = _download(hf_model, [*_SIDE_FILES, _CODE, *(_WEIGHT_FILES if weights else ())])
    if (name := _file_with_code(folder)) and not trust_remote_code:
        raise CheckpointError(
            f"{folder / name} refers to code in the model's folder (auto_map): set --trust-remote-code to copy the code"
        )
    return folder


def _file_with_code(folder: Path) -> str | None:
    """Return the name of a config file that refers to the model's own code; None if there is none."""
    for path in sorted(folder.glob("*config.json")):
        if path.is_file() and "auto_map" in read_object(path):
            return path.name
    return None


def _download(hf_model: str | Path, patterns: list[str]) -> Path:
    if expanded(hf_model).exists():
        raise CheckpointError(f"{hf_model} is a file, expected a folder with config.json and *.safetensors")
    if isinstance(hf_model, Path) or not _HUB_ID.fullmatch(hf_model):
        raise CheckpointError(f"{hf_model} does not exist, expected a folder with config.json and *.safetensors")
    import httpx

    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hf_model, allow_patterns=patterns))
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        OSError,
        ValueError,
    ) as error:  # importing raises ValueError for a bad HF_ENDPOINT
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        endpoint = f"; HF_ENDPOINT is {os.environ['HF_ENDPOINT']!r}" if "HF_ENDPOINT" in os.environ else ""
        raise CheckpointError(
            f"{hf_model} is neither a folder nor a model available from the hub: {reason}{endpoint}"
            f"{nearest_name(str(hf_model))}"
        ) from error


def is_path(model: str | Path) -> bool:
    """Return True if `model` is a Path, or text that looks like a path and not like a hub id."""
    return isinstance(model, Path) or model.startswith(("/", "./", "../", "~"))


def find_in_cache(hub_id: str) -> Path | None:
    """Return the folder in the local hub cache with the config.json of a model; None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(hub_id, "config.json")
    except ValueError:  # not a valid hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def exists_on_hub(hub_id: str) -> bool:
    """Return True if the hub has a model with this id. Send a request to the hub."""
    import httpx
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
        return False
    return True


def side_files(folder: Path) -> list[Path]:
    """Return the sorted relative paths of the configuration, tokenizer, processor and code files in a folder."""
    found = (path.relative_to(folder) for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    patterns = (*_SIDE_FILES, _CODE) if _file_with_code(folder) else _SIDE_FILES
    return sorted(path for path in found if any(fnmatch(path.as_posix(), pattern) for pattern in patterns))


def copy_side_files(source: Path, destination: Path) -> list[Path]:
    """Copy configuration, tokenizer and processor files of a model to another folder. Return their relative paths."""
    files = side_files(source)
    for relative in files:
        target = destination / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, target)
    return files


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file. Its bytes begin at `offset`."""

    spec: TensorSpec
    path: Path
    offset: int


class HFWeights:
    """`TensorSource` of the tensors in the folder of a Hugging Face model."""

    def __init__(self, folder: Path, file: str | None = None, *, dequantize: bool = True) -> None:
        """Read and check the header of every file.

        Args:
            folder: the model's folder.
            file: name of a file that contains all tensors; None for the files that the index lists.
            dequantize: whether to multiply FP8 weights by their scales. If False, the e4m3 weights and their scales are
                separate tensors.

        Raises:
            CheckpointError: files are missing, truncated, or contradict each other.
        """
        self.folder = folder
        found = _read_folder(folder) if file is None else read_header(folder / file)
        self._stored = {stored.spec.name: stored for stored in found}
        self.specs = {name: stored.spec for name, stored in self._stored.items()}
        self._scales_of: dict[str, str] = {}  # FP8 tensor -> tensor with its scales, which may be shared
        if dequantize and any(spec.dtype == fp8.E4M3 for spec in self.specs.values()):
            self.specs = dict(self._dequantize_specs())

    @property
    def scales(self) -> dict[str, StoredTensor]:
        """Return the stored scales of FP8 weights, by tensor name."""
        names = (scales for name, scales in self._scales_of.items() if name in self.specs)
        return {name: self._stored[name] for name in names}

    def _dequantize_specs(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield (name, spec) of every tensor. FP8 tensors have the dtype bfloat16, and their scales are left out."""
        path = self.folder / "config.json"
        quantization = read_object(path).get("quantization_config")
        try:
            block = fp8_block(quantization)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        in_fp8 = [name for name, spec in self.specs.items() if spec.dtype == fp8.E4M3]
        self._scales_of = {name: fp8.find_scales(name, self.specs) for name in in_fp8}
        all_scales = set(self._scales_of.values())
        for name, spec in self.specs.items():
            if name in all_scales:
                continue
            if spec.dtype != fp8.E4M3:
                yield name, spec
                continue
            scales_name = self._scales_of[name]
            scales = self._stored.get(scales_name)
            found = "nothing" if scales is None else scales.spec.describe()
            is_shared, found_block = scales_name != name + fp8.SCALES, None
            if scales is not None and len(spec.shape) >= 2:
                found_block = fp8.match_block(spec.shape, scales.spec.shape, None if is_shared else block)
            if scales is None or found_block is None or scales.spec.dtype not in fp8.SCALE_DTYPES:
                of_each = "matrix" if block is None else f"block of {block[0]} x {block[1]}"
                expected = "one scale" if is_shared else f"a scale for each {of_each}"
                raise CheckpointError(
                    f"{self.folder}, tensor {name} {spec.describe()}: found {found} as {scales_name}, expected "
                    f"{expected}, in {', '.join(fp8.SCALE_DTYPES)}"
                )
            stored = BlockScales(
                ByteRange(scales.path, scales.offset, scales.spec.nbytes), scales.spec.dtype, found_block
            )
            yield name, replace(spec, dtype="bfloat16", scales=stored)

    def byte_ranges(self, wanted: TensorSlice) -> Iterator[ByteRange]:
        """Yield the byte range that stores the elements of a slice."""
        stored = self._stored[wanted.tensor]
        size = ITEMSIZE[stored.spec.dtype]
        yield ByteRange(stored.path, stored.offset + wanted.start * size, wanted.length * size)

    @property
    def files(self) -> list[Path]:
        """Return the sorted paths of the files that contain the tensors."""
        return sorted({stored.path for stored in self._stored.values()})

    def unread_files(self, modules: Collection[str]) -> list[Path]:
        """Return the paths of the weight files in the folder that are not read (see `why_unread`).

        Raises:
            CheckpointError: an unread file contains a tensor that is in no file that is read, and the name of the
                tensor begins with one of `modules`.
        """
        files = sorted(set(self.folder.glob("*.safetensors")) - set(self.files))
        for path in files:
            names = {stored.spec.name for stored in read_header(path)} - self._stored.keys()
            if lost := sorted(name for name in names if name.partition(".")[0] in modules):
                raise CheckpointError(
                    f"{path} holds {len(lost)} tensors that would be lost, such as {lost[0]}: {self.why_unread()}. "
                    f"Name the file in the weight_map of {INDEX}, or move it out of the folder"
                )
        return files

    def why_unread(self) -> str:
        """Return the reason why weight files in the folder are not read, as text for the end of a message."""
        return (
            f"{SINGLE} is read instead of {INDEX}" if (self.folder / SINGLE).exists() else f"{INDEX} does not name it"
        )


def has_weights(folder: Path) -> bool:
    """Return True if a folder has a safetensors file or index with the names that transformers uses."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def _read_folder(folder: Path) -> list[StoredTensor]:
    # As in transformers, a single file has precedence over an index.
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not index.exists():
        raise CheckpointError(f"{folder} has no weights, expected {SINGLE} or {INDEX}; {describe_contents(folder)}")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map, expected an object with the file of each tensor")
    files: dict[Path, set[str]] = {}
    for name, relative in weight_map.items():
        files.setdefault(resolve_within(folder, relative, f"{index}, tensor {name}"), set()).add(name)
    tensors = []
    for path, names in sorted(files.items()):
        shard = read_header(path, named_by=index.name)
        found = {stored.spec.name for stored in shard}
        for holds, lists, different in (("lacks", "lists", names - found), ("holds", "does not list", found - names)):
            if different:
                some = ", ".join(sorted(different)[:5]) + (" ..." if len(different) > 5 else "")
                problem = f"{path} {holds} {len(different)} tensors that {index.name} {lists} for it"
                raise CheckpointError(f"{problem}: {some}")
        tensors += shard
    return tensors


def read_header(path: Path, named_by: str = "its folder") -> list[StoredTensor]:
    """Return the names, shapes, dtypes and offsets of the tensors in a safetensors file, after a check of its header.

    Args:
        path: the file.
        named_by: the index that names the file, for errors.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    size = file_size(path, named_by)
    try:
        with safe_open(path, "np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} of {size} bytes: {error}; expected a complete safetensors file: download or save it again"
        ) from error
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        if (dtype := entry["dtype"]) not in DTYPE_OF_SAFETENSORS:
            raise CheckpointError(f"{path}, tensor {name}: dtype {dtype}, expected {', '.join(DTYPE_OF_SAFETENSORS)}")
        spec = TensorSpec(name, DTYPE_OF_SAFETENSORS[dtype], tuple(entry["shape"]))
        tensors.append(StoredTensor(spec, path, 8 + length + entry["data_offsets"][0]))
    return tensors


def split_into_shards(tasks: Sequence[Task], max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, list[Task]]:
    """Divide tensors into weight files; return the tensors of each file, by file name.

    A tensor larger than `max_shard_bytes` gets its own file.
    """
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


def plan_file(name: str, tasks: Sequence[Task]) -> OutputFile:
    """Return the plan of a safetensors file that contains the tensors of `tasks`."""
    # As safetensors does, wider elements come first, so that every tensor is aligned to its element size.
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
        file.append(TensorData(task.slices, task.target.dtype, 0, task.target.numel))
    return file


def write_index(folder: Path, files: Mapping[str, Sequence[Task]]) -> None:
    """Write the index of the weight files from `split_into_shards`. A single file needs no index."""
    if len(files) == 1:
        return
    weight_map = {task.target.name: name for name, tasks in files.items() for task in tasks}
    specs = [task.target for tasks in files.values() for task in tasks]
    metadata = {"total_parameters": sum(spec.numel for spec in specs), "total_size": sum(spec.nbytes for spec in specs)}
    write_object(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
