"""Writes the files around a Megatron checkpoint's tensors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron import folder as megatron
from qwen3vl_bridge.io.json_files import write_object

# Megatron-LM reads all three and fails without any of them; `args` may be None.
BYTE_ITEMS: Mapping[str, Any] = {"checkpoint_version": 3.0, "iteration": 0, "args": None}
# megatron-core's own format has one such item instead. `content_metadata` says how tensors are sharded: as by default.
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


def write_run_files(root: Path, folder: Path, run_config: Mapping[str, Any], ckpt_format: str) -> None:
    """Write the files by which Megatron recognises a checkpoint without any training step.

    Args:
        root: the checkpoint's folder.
        folder: the iteration's folder in it.
        run_config: contents of `run_config.yaml`.
        ckpt_format: which of the two formats.
    """
    import torch
    import yaml

    # megatron.bridge.training.state.TrainState.state_dict() of a run that has not begun.
    counts = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    state: dict[str, torch.Tensor] = {name: torch.tensor(0, dtype=torch.int64) for name in counts}
    state["floating_point_operations_so_far"] = torch.tensor(0, dtype=torch.float64)
    state |= {name: torch.tensor(False) for name in ("do_train", "do_valid", "do_test")}
    torch.save(state, folder / megatron.TRAIN_STATE)
    shutil.copyfile(folder / megatron.TRAIN_STATE, root / megatron.LATEST_TRAIN_STATE)
    (folder / megatron.RUN_CONFIG).write_text(yaml.safe_dump(dict(run_config), sort_keys=False), encoding="utf-8")
    if ckpt_format == megatron.TORCH_DIST:
        backend = {"sharded_backend": megatron.TORCH_DIST, "sharded_backend_version": 1}
        write_object(folder / megatron.FORMAT_FILE, backend)
    (root / megatron.TRACKER).write_text("0")
