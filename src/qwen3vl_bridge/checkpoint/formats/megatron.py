"""Find the folder of a Megatron checkpoint, and read and write the files in it that contain no tensors."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.dcp import METADATA, DcpMetadata
from qwen3vl_bridge.checkpoint.formats.huggingface import describe_contents
from qwen3vl_bridge.core.files import CheckpointError, check_plain, read_object, read_yaml, write_object
from qwen3vl_bridge.weights.rows import without_former_mtp_name

TRACKER = "latest_checkpointed_iteration.txt"
TRAIN_STATE = "train_state.pt"
LATEST_TRAIN_STATE = f"latest_{TRAIN_STATE}"
RUN_CONFIG = "run_config.yaml"
HF_FILES = "hf"

# megatron-core's names of the two formats.
FSDP_DTENSOR, TORCH_DIST = "fsdp_dtensor", "torch_dist"
FORMATS = (FSDP_DTENSOR, TORCH_DIST)
# This file names the format. An fsdp_dtensor folder does not contain it.
FORMAT_FILE = "metadata.json"

# Megatron-LM reads all three and fails if one is missing; `args` may be None.
BYTE_ITEMS: Mapping[str, Any] = {"checkpoint_version": 3.0, "iteration": 0, "args": None}
# megatron-core's own format has this item instead. `content_metadata` is the default sharding.
COMMON_STATE = (
    "common_state/shard_0_1",
    [
        {
            "checkpoint_version": 3.0,
            "iteration": 0,
            "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
        }
    ],
)

# Parameters of a model wrapped in MegatronFSDP have a prefix. In megatron-core's own format they have none.
_SECTION, _WRAPPER = "model", "module."
_PREFIX = {FSDP_DTENSOR: f"{_SECTION}.{_WRAPPER}", TORCH_DIST: ""}
# Prefixes of parameter names. A torch_dist folder has other tensors too, such as optimizer state.
_COMPONENTS = ("language_model.", "vision_model.")


def key_of(parameter: str, ckpt_format: str = FSDP_DTENSOR) -> str:
    """Return the key of a parameter in a checkpoint."""
    return _PREFIX[ckpt_format] + parameter


def path_of(key: str) -> tuple[str, ...]:
    """Return the path of keys in the nested state dict that leads to the item with a checkpoint key."""
    return (_SECTION, key.removeprefix(f"{_SECTION}.")) if key.startswith(f"{_SECTION}.") else (key,)


def model_keys(metadata: DcpMetadata, ckpt_format: str = FSDP_DTENSOR) -> dict[str, str]:
    """Return a dict from the name of each model parameter to its key in the checkpoint. Optimizer state is left out.

    Raises:
        CheckpointError: there are no model parameters.
    """
    prefix = _PREFIX[ckpt_format]
    names = {key.removeprefix(prefix): key for key in metadata.tensors if key.startswith(prefix)}
    if ckpt_format == TORCH_DIST:
        names = {name: key for name, key in names.items() if name.startswith(_COMPONENTS)}
    else:
        names = {without_former_mtp_name(name): key for name, key in names.items()}
    # `_loss_modules` are trained by distillation and are no part of the model.
    names = {n: key for n, key in names.items() if "_extra_state" not in n and not n.startswith("_loss_modules.")}
    if not names:
        found = ", ".join(sorted(metadata.tensors)[:3]) or "no tensors"
        expected = prefix or " or ".join(_COMPONENTS)
        raise CheckpointError(f"{metadata.folder} holds no model: found {found}, expected keys like {expected}...")
    return names


def format_of(folder: Path) -> str:
    """Return "fsdp_dtensor" or "torch_dist" for an iteration's folder. Raise CheckpointError for other formats."""
    if not (folder / FORMAT_FILE).is_file():
        return FSDP_DTENSOR
    found = read_object(folder / FORMAT_FILE).get("sharded_backend")
    if found != TORCH_DIST:
        raise CheckpointError(f"{folder / FORMAT_FILE}: sharded_backend is {found!r}, expected {TORCH_DIST!r}")
    return TORCH_DIST


def iteration_folder(root: Path, iteration: int) -> Path:
    """Return the folder of an iteration, such as root/iter_0000100."""
    return root / f"iter_{iteration:07d}"


def find_iteration(path: Path, iteration: int | None = None) -> Path:
    """Return the folder of an iteration; raise CheckpointError if it does not exist.

    Args:
        path: a checkpoint's root folder, or the folder of an iteration.
        iteration: the iteration; None for the latest.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: {describe_contents(path)}, expected the folder of a Megatron checkpoint")
    if (path / METADATA).is_file():
        if iteration is not None and path.name != iteration_folder(path, iteration).name:
            raise CheckpointError(
                f"{path} is the folder of another iteration than --iteration {iteration}: omit --iteration, or give "
                "the checkpoint's root folder"
            )
        return path
    folder = _find_latest(path) if iteration is None else iteration_folder(path, iteration)
    if not (folder / METADATA).is_file():
        others = ", ".join(sorted(entry.name for entry in path.glob("iter_*"))) or "none"
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {METADATA}; iterations found: {others}")
    return folder


def _find_latest(path: Path) -> Path:
    """Return the folder of the latest iteration, which Megatron-Bridge reads from its own file before the tracker."""
    if (path / LATEST_TRAIN_STATE).is_file():
        import torch  # imported here because it is slow

        try:
            return iteration_folder(path, int(torch.load(path / LATEST_TRAIN_STATE, weights_only=True)["step"]))
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path / LATEST_TRAIN_STATE} cannot be read ({type(error).__name__}): give one of the folders iter_* "
                f"instead, or replace the file by a copy of {TRAIN_STATE} in the latest of them"
            ) from error
    tracker = path / TRACKER
    try:
        text = tracker.read_text(errors="replace").strip()
    except FileNotFoundError:
        missing = f"it has neither {TRACKER} nor {METADATA}"
        raise CheckpointError(f"{path} is not a Megatron checkpoint: {missing}; {describe_contents(path)}") from None
    except OSError as error:
        raise CheckpointError(f"{tracker}: {error.strerror or error}") from error
    if text == "release":
        return path / "release"
    if not (text.isascii() and text.isdigit() and len(text) < 13):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, expected an iteration number")
    return iteration_folder(path, int(text))


def is_megatron_checkpoint(path: Path) -> bool:
    """Return True if a folder has a file of a Megatron checkpoint's root or of an iteration."""
    return any((path / name).is_file() for name in (METADATA, TRACKER, LATEST_TRAIN_STATE))


def run_config(
    hf_config: Mapping[str, Any],
    hf_model: str,
    ckpt_format: str,
    *,
    provider: str,
    vocabulary: int,
    rows: int,
    vocab_divisor: int | None = None,
) -> dict[str, Any]:
    """Return the contents of `run_config.yaml` for a checkpoint that a conversion writes.

    Megatron-Bridge builds the model from the section `model`. Its loader reads the sizes of tensor and pipeline
    parallelism in this section, and its export to Hugging Face reads `hf_model_id`.

    Args:
        hf_config: contents of the model's `config.json`.
        hf_model: folder or hub id that the model comes from.
        ckpt_format: "fsdp_dtensor" or "torch_dist".
        provider: dotted name of the function that creates a provider from `hf_config`. Megatron-Bridge calls it only if
            the function's package is registered (`register_allowed_target_prefix`).
        vocabulary: number of tokens.
        rows: number of rows of the embedding, with padding.
        vocab_divisor: number that divides the embedding rows of each tensor-parallel rank; None if unknown, or without
            padding.

    Raises:
        CheckpointError: Megatron-Bridge would execute a part of the configuration.
    """
    _check_passive(hf_config, "config.json")
    _check_passive(hf_model, "the name of the model")
    # A divisor with which Megatron-Bridge pads the vocabulary to this many rows. The smallest divisor is valid for the
    # most tensor-parallel sizes.
    if vocab_divisor is None or -(-vocabulary // vocab_divisor) * vocab_divisor != rows:
        candidates = range(rows - vocabulary + 1, rows + 1) if rows != vocabulary else ()
        vocab_divisor = next((number for number in candidates if rows % number == 0), None)
    padded = {"should_pad_vocab": True, "make_vocab_size_divisible_by": vocab_divisor}
    return {
        "model": {
            "_target_": provider,
            "hf_config": dict(hf_config),
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "hf_model_id": hf_model,
            **(padded if vocab_divisor is not None else {}),
        },
        "checkpoint": {"ckpt_format": ckpt_format, "save_optim": False, "save_rng": False, "fully_parallel_save": True},
    }


def _check_passive(value: Any, where: str) -> None:
    """Raise CheckpointError if Megatron-Bridge would execute a part of a configuration, such as a `_target_`.

    `where` names the configuration in the message.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key.startswith("_") and key.endswith("_"):
                raise CheckpointError(
                    f"{where} has the key {key!r}, expected no key like _name_: Megatron-Bridge may run code for it"
                )
            _check_passive(inner, f"{where}, {key}")
    elif isinstance(value, list):
        for inner in value:
            _check_passive(inner, where)
    elif isinstance(value, str) and "${" in value:
        raise CheckpointError(f"{where} is {value[:80]!r}, expected no text with ${{: Megatron-Bridge would replace it")


def read_run_config(folder: Path) -> dict[str, Any]:
    """Read `run_config.yaml` in an iteration's folder; raise CheckpointError if it is missing or invalid."""
    path = folder / RUN_CONFIG
    try:
        found = read_yaml(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected sections of settings")
    for name in ("model", "checkpoint", "peft"):  # the sections that are read
        if not isinstance(found.get(name) or {}, dict):
            raise CheckpointError(f"{path}: {name} is {str(found[name])[:80]}, expected a section of settings")
    try:
        check_plain(found.get("peft"), "peft")
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return found


def write_run_files(root: Path, folder: Path, run_config: Mapping[str, Any], ckpt_format: str) -> None:
    """Write the files with which Megatron recognizes a checkpoint of iteration 0.

    Args:
        root: the checkpoint's folder.
        folder: the iteration's folder in it.
        run_config: contents of `run_config.yaml`.
        ckpt_format: "fsdp_dtensor" or "torch_dist".
    """
    import torch
    import yaml

    # As megatron.bridge.training.state.TrainState.state_dict() of a run that has not begun.
    counts = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    state: dict[str, torch.Tensor] = {name: torch.tensor(0, dtype=torch.int64) for name in counts}
    state["floating_point_operations_so_far"] = torch.tensor(0, dtype=torch.float64)
    state |= {name: torch.tensor(False) for name in ("do_train", "do_valid", "do_test")}
    torch.save(state, folder / TRAIN_STATE)
    shutil.copyfile(folder / TRAIN_STATE, root / LATEST_TRAIN_STATE)
    (folder / RUN_CONFIG).write_text(yaml.safe_dump(dict(run_config), sort_keys=False), encoding="utf-8")
    if ckpt_format == TORCH_DIST:
        write_object(folder / FORMAT_FILE, {"sharded_backend": TORCH_DIST, "sharded_backend_version": 1})
    (root / TRACKER).write_text("0")
