"""The folder of a Megatron checkpoint: the files around the tensors.

What lives here: names of files and keys, finding an iteration, train state, tracker and manifest. What may not:
tensors' bytes, the weight table.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.dcp_metadata import FILE as METADATA
from qwen3vl_bridge.checkpoint.dcp_metadata import DcpMetadata
from qwen3vl_bridge.checkpoint.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
TRAIN_STATE = "train_state.pt"
LATEST_TRAIN_STATE = f"latest_{TRAIN_STATE}"
RUN_CONFIG = "run_config.yaml"
MANIFEST = "qwen3vl_bridge.json"
HF_FILES = "hf"
# Where Megatron-Bridge itself keeps a run's tokenizer.
TOKENIZER = "tokenizer"

# How megatron-core's state dict of a model wrapped in MegatronFSDP begins.
_SECTION, _WRAPPER = "model", "module."
_PREFIX = f"{_SECTION}.{_WRAPPER}"

# Megatron-LM reads all three and fails without any of them; `args` may be None.
BYTE_ITEMS: Mapping[str, Any] = {"checkpoint_version": 3.0, "iteration": 0, "args": None}


def key_of(parameter: str) -> str:
    """Key of a parameter in a checkpoint."""
    return _PREFIX + parameter


def path_of(parameter: str) -> tuple[str, ...]:
    """Where a parameter is in the nested state dict."""
    return _SECTION, _WRAPPER + parameter


def model_keys(metadata: DcpMetadata) -> dict[str, str]:
    """The model's parameters in a checkpoint: name -> key. Optimizer state and the like are left aside.

    Raises:
        CheckpointError: there is none.
    """
    names = {key.removeprefix(_PREFIX): key for key in metadata.tensors if key.startswith(_PREFIX)}
    names = {name: key for name, key in names.items() if not name.endswith("_extra_state")}
    if not names:
        found = ", ".join(sorted(metadata.tensors)[:3]) or "no tensors"
        raise CheckpointError(f"{metadata.folder} holds no model: found {found}, expected keys like {_PREFIX}...")
    return names


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where an iteration's files are."""
    return root / f"iter_{iteration:07d}"


def find_iteration(path: Path, iteration: int | None = None) -> Path:
    """The iteration's folder to read.

    Args:
        path: a checkpoint's root folder, or an iteration's folder itself.
        iteration: which one; None for the latest.

    Raises:
        CheckpointError: there is none.
    """
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise CheckpointError(f"{path}: found {found}, expected the folder of a Megatron checkpoint")
    if (path / "metadata.json").is_file():
        raise CheckpointError(f"{path} is a torch_dist checkpoint (it has metadata.json), expected fsdp_dtensor")
    if (path / METADATA).is_file():
        if iteration is not None and path.name != iteration_folder(path, iteration).name:
            raise CheckpointError(f"{path} is a single iteration, which --iteration {iteration} does not name")
        return path
    folder = _latest(path) if iteration is None else iteration_folder(path, iteration)
    if (folder / "metadata.json").is_file():
        raise CheckpointError(f"{folder} is a torch_dist checkpoint (it has metadata.json), expected fsdp_dtensor")
    if not (folder / METADATA).is_file():
        others = ", ".join(sorted(entry.name for entry in path.glob("iter_*"))) or "none"
        raise CheckpointError(f"{folder} is no checkpoint: it has no {METADATA}; iterations found: {others}")
    return folder


def _latest(path: Path) -> Path:
    tracker = path / TRACKER
    try:
        text = tracker.read_text(errors="replace").strip()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no Megatron checkpoint: it has neither {TRACKER} nor {METADATA}") from None
    except OSError as error:
        raise CheckpointError(f"{tracker}: {error.strerror or error}") from error
    if text == "release":
        return path / "release"
    if not (text.isascii() and text.isdigit() and len(text) < 13):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, expected the number of an iteration")
    return iteration_folder(path, int(text))


def is_megatron_checkpoint(path: Path) -> bool:
    """Whether a folder looks like a checkpoint's root."""
    return (path / TRACKER).is_file() or (path / LATEST_TRAIN_STATE).is_file()


def write_run_files(root: Path, folder: Path, run_config: Mapping[str, Any]) -> None:
    """Write the files with which Megatron finds and judges a checkpoint that no training step has seen.

    Args:
        root: the checkpoint's folder.
        folder: the iteration's folder in it.
        run_config: contents of `run_config.yaml`.
    """
    import torch
    import yaml

    # megatron.bridge.training.state.TrainState.state_dict() of a run that has not begun.
    counts = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    state: dict[str, torch.Tensor] = {name: torch.tensor(0, dtype=torch.int64) for name in counts}
    state["floating_point_operations_so_far"] = torch.tensor(0, dtype=torch.float64)
    state |= {name: torch.tensor(False) for name in ("do_train", "do_valid", "do_test")}
    torch.save(state, folder / TRAIN_STATE)
    shutil.copyfile(folder / TRAIN_STATE, root / LATEST_TRAIN_STATE)
    (folder / RUN_CONFIG).write_text(yaml.safe_dump(dict(run_config), sort_keys=False), encoding="utf-8")
    (root / TRACKER).write_text("0")
