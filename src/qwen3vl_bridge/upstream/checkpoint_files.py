"""Functions of Megatron-Bridge that find and read files of checkpoints.

Borrowed from `megatron.bridge.training.checkpointing`:
- `_get_global_non_persistent_checkpoint_dirs`, folders of checkpoints that a run keeps for a restart only;
- `_load_model_weights_from_checkpoint`, which restores the quantizers of ModelOpt too;
- `_get_filesystem_reader`, which reads from object stores if Megatron-Bridge does;
- the key "_model", by which `load_checkpoint` gives the model to its loader of `fsdp_dtensor`.

The public functions that call them (`load_checkpoint`, `load_megatron_model`) load a whole run or build a model. Delete
each function when there is a public one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training import checkpointing
from megatron.bridge.training.config import CheckpointConfig
from torch.distributed.checkpoint import StorageReader


def non_persistent_folders(settings: CheckpointConfig) -> tuple[str, ...]:
    """Return the folders that may have non-persistent checkpoints of the type "global", whether or not they exist."""
    return checkpointing._get_global_non_persistent_checkpoint_dirs(settings.load, settings)


def load_quantized_weights(folder: str | Path, model: list[torch.nn.Module]) -> None:
    """Load a `torch_dist` checkpoint into a model that ModelOpt has quantized.

    Layers that only the checkpoint has are ignored.
    """
    checkpointing._load_model_weights_from_checkpoint(str(folder), model)


def storage_reader(folder: str | Path) -> StorageReader:
    """Return the reader that Megatron-Bridge uses for a checkpoint folder of torch.distributed.checkpoint."""
    return checkpointing._get_filesystem_reader(folder)


def fsdp_chunks(state_dict: Mapping[str, Any]) -> list[torch.nn.Module] | None:
    """Return the model chunks in a state dict for loading an `fsdp_dtensor` checkpoint; None if it has no model."""
    return state_dict.get("_model")
