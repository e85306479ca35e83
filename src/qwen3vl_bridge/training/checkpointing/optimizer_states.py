"""Whether a checkpoint has the optimizer's state of what a run trains.

What lives here: the check, made before anything is loaded. What may not: settings of an optimizer's groups
(`optimizer_groups.py`), learning rates (`schedules.py`), adapters, which are compared separately.

megatron-core looks for the state of every trained parameter, and fails in the middle if a checkpoint lacks one, with
the names of everything in it. The state of parameters that are no longer trained is ignored; but a distributed
optimizer's state that was saved by index (`dist_ckpt_optim_fully_reshardable` false) fits only the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.dcp.metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron.folder import RUN_CONFIG, TORCH_DIST
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.model_parts import Part
from qwen3vl_bridge.weights.rows import expand

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.checkpoint_utils import read_run_config

_NEW = "checkpoint.load_optim=false, to start with a new optimizer state"
_MTP = "mtp_loss_scaling_factor"


def expect_optimizer(folder: Path, cfg: ConfigContainer) -> None:
    """Check that a checkpoint has the optimizer's state that a run will look for.

    Args:
        folder: the checkpoint's.
        cfg: the run's.

    Raises:
        CheckpointError: it does not; the message says what to set.
    """
    if cfg.checkpoint.finetune or not cfg.checkpoint.load_optim or not (folder / RUN_CONFIG).is_file():
        return
    saved = read_run_config(str(folder / RUN_CONFIG))
    kept, theirs, ours = saved.get("checkpoint") or {}, saved.get("model") or {}, vars(cfg.model)
    if not kept.get("save_optim", True):
        raise CheckpointError(
            f"{folder} was saved without the optimizer (checkpoint.save_optim=false): expected {_NEW}"
        )
    if cfg.peft is not None:
        return
    before, now, numbered = _trained(theirs), _trained(ours), _is_numbered(kept, saved.get("optimizer") or {})
    if found := [name for name in now if now[name] > before[name] or (numbered and now[name] != before[name])]:
        lacks = "and lacks the state of parameters that are trained now"
        why = "by index, and fits no other parameters" if numbered else lacks
        said = ", ".join(f"model.{name} is {ours.get(name)}, the checkpoint has {theirs.get(name)}" for name in found)
        raise CheckpointError(
            f"{said}: the optimizer's state in {folder} was saved with the checkpoint's value, {why}; expected the "
            f"checkpoint's settings, or {_NEW}"
        )
    if numbered and now[f"freeze_{Part.LANGUAGE_MODEL.value}"] and (rounded := _in_16_bits(folder, cfg)):
        raise CheckpointError(
            f"{folder} has {rounded[0]} in 16 bits, as Megatron-Bridge's own model, and this run in float32: the "
            f"optimizer's state was saved by index, and does not fit; expected {_NEW}"
        )


def _in_16_bits(folder: Path, cfg: ConfigContainer) -> list[str]:
    """Parameters in a checkpoint that this run has in float32."""
    rows = tuple(row for row in family(cfg.model.family).rows() if row.float32)
    found = read_metadata(folder).tensors if rows else {}
    names = [row.megatron for row in expand(rows, cfg.model.dimensions()) if row.megatron in found]
    return [name for name in names if found[name][0].dtype != "float32"]


def _trained(model: Mapping[str, Any]) -> dict[str, bool]:
    """Whether a part is trained, according to the model's settings."""
    parts = {f"freeze_{part.value}": not model.get(f"freeze_{part.value}") for part in Part}
    mtp = bool(model.get("mtp_num_layers") and model.get(_MTP))
    return parts | {_MTP: mtp and parts[f"freeze_{Part.LANGUAGE_MODEL.value}"]}


def _is_numbered(settings: Mapping[str, Any], optimizer: Mapping[str, Any]) -> bool:
    return (
        settings.get("ckpt_format") == TORCH_DIST
        and not settings.get("dist_ckpt_optim_fully_reshardable")
        and bool(optimizer.get("use_distributed_optimizer"))
    )
