"""Functions of Megatron-Bridge that find and read files of checkpoints.

Called or read in `megatron.bridge.training.checkpointing`:
- `_get_global_non_persistent_checkpoint_dirs`, which returns the folders of checkpoints that only serve a restart;
- `_load_model_weights_from_checkpoint`, which also restores the quantizers of ModelOpt;
- `_get_filesystem_reader`, which also reads from the object stores that Megatron-Bridge supports;
- the key "_model", under which `load_checkpoint` passes the model to the loader of `fsdp_dtensor` checkpoints.

The public functions that call these (`load_checkpoint`, `load_megatron_model`) load a full run or build a model. Delete
each function of this module when Megatron-Bridge has a public one.
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

    Layers that are only in the checkpoint are ignored.
    """
    checkpointing._load_model_weights_from_checkpoint(str(folder), model)


def storage_reader(folder: str | Path) -> StorageReader:
    """Return the reader that Megatron-Bridge uses for a checkpoint folder of torch.distributed.checkpoint."""
    return checkpointing._get_filesystem_reader(folder)


def fsdp_chunks(state_dict: Mapping[str, Any]) -> list[torch.nn.Module] | None:
    """Return the model chunks in a state dict for loading an `fsdp_dtensor` checkpoint; None if it has no model."""
    return state_dict.get("_model")
