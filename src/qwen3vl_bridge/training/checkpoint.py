"""Training checkpoints: weights, optimizer, schedule, random state and data position, in the fsdp_dtensor layout.

What lives here: which tensors and states a run has, and what they are called on disk. What may not: names of files and
how a folder comes into being (`qwen3vl_bridge.checkpoint`).

The ranks of the small loop all hold the same, so the first one writes. A folder is written beside its place and moved
there when it is whole; only then do the tracker files name it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_bridge import mappings
from qwen3vl_bridge.checkpoint.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.megatron_files import BYTE_ITEMS
from qwen3vl_bridge.checkpoint.megatron_folder import (
    HF_FILES,
    LATEST_TRAIN_STATE,
    RUN_CONFIG,
    TRACKER,
    TRAIN_STATE,
    find_iteration,
    iteration_folder,
    key_of,
)
from qwen3vl_bridge.checkpoint.staging import replace_file, staged
from qwen3vl_bridge.parallel import wait_for_all
from qwen3vl_bridge.provider import Qwen3VLModelProvider
from qwen3vl_bridge.weight_rows import Row, expand

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch import Tensor

if TYPE_CHECKING:
    from qwen3vl_bridge.training.run import Run

logger = logging.getLogger(__name__)

# What Megatron's formats have no place for.
_RUN_STATE = "run_state.pt"
_OPTIMIZER = "optimizer.state.module.module.module."
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _rows_by_name(provider: Qwen3VLModelProvider) -> dict[str, Row]:
    """The table's rows under the parameter names of the model's layer spec."""
    local = provider.transformer_impl == "local"
    rows = expand(mappings.TABLE, provider.dimensions())
    return {mappings.local_name(row.megatron) if local else row.megatron: row for row in rows}


def _named_parameters(model: list[torch.nn.Module]) -> Iterator[tuple[Row, torch.nn.Parameter]]:
    (bare,) = unwrap_model(model)
    rows = _rows_by_name(bare.config)
    for name, parameter in bare.named_parameters():
        yield rows[name], parameter


def _parts(row: Row, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a parameter-shaped tensor is stored as; the parts are views of it."""
    yield from zip(row.stored, tensor.chunk(len(row.stored)), strict=True)


def _weights(model: list[torch.nn.Module]) -> dict[str, Tensor]:
    """Every weight as stored, in float32 where the optimizer keeps such a copy. Views: loading fills the model."""
    return {
        key_of(name): part
        for row, parameter in _named_parameters(model)
        for name, part in _parts(row, getattr(parameter, "main_param", parameter).detach())
    }


def _moments(run: Run) -> dict[str, Tensor]:
    """The optimizer's tensors as stored, made as zeros for parameters it has not stepped yet."""
    state = _adam_states(run)
    tensors = {}
    for row, parameter in _named_parameters(run.model):
        if not parameter.requires_grad:
            continue
        main = getattr(parameter, "main_param", parameter)
        state[main].setdefault("step", torch.zeros(()))
        for moment in _MOMENTS:
            values = state[main].setdefault(moment, torch.zeros_like(main, dtype=torch.float32))
            for name, part in _parts(row, values):
                tensors[f"{_OPTIMIZER}{name}.{moment}"] = part
    return tensors


def _adam_states(run: Run) -> dict[Tensor, dict]:
    """What Adam keeps of each parameter it steps, to be read and written. Experts have an optimizer of their own."""
    optimizers = getattr(run.optimizer, "chained_optimizers", [run.optimizer])
    groups = [(one.optimizer, group) for one in optimizers for group in one.optimizer.param_groups]
    return {parameter: adam.state[parameter] for adam, group in groups for parameter in group["params"]}


def _run_state(run: Run) -> dict:
    steps = [int(s["step"]) for s in _adam_states(run).values() if "step" in s]
    return {
        "optimizer_step": max(steps, default=0),
        "scheduler": run.scheduler.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "tracked_rng": get_cuda_rng_tracker().get_states(),
        "stream": run.stream.state_dict(),
    }


def _restore_run_state(run: Run, saved: dict) -> None:
    for state in _adam_states(run).values():
        state["step"] = torch.tensor(float(saved["optimizer_step"]))
    run.scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["torch_rng"])
    get_cuda_rng_tracker().set_states(saved["tracked_rng"])
    run.stream.load_state_dict(saved["stream"])


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint of a run, or None where there is none yet.

    Raises:
        CheckpointError: the tracker names a checkpoint that is not there.
    """
    folder = Path(folder)
    return find_iteration(folder) if (folder / TRACKER).exists() else None


def save(folder: str | Path, run: Run) -> Path:
    """Write a checkpoint of the run as it stands and make it the newest.

    Args:
        folder: of the run; the checkpoint becomes `iter_<step>` in it.

    Returns:
        The checkpoint's folder.
    """
    folder, step = Path(folder), run.progress.step
    final = iteration_folder(folder, step)
    if torch.distributed.get_rank() == 0:
        # One of this step is there where a run was resumed from before it; it is replaced in one move.
        with staged(final, logger.info, replace=lambda _: True) as aside:
            _write(aside, run)
        replace_file(folder / LATEST_TRAIN_STATE, (final / TRAIN_STATE).read_bytes())
        replace_file(folder / TRACKER, str(step).encode())
    wait_for_all()
    return final


def _write(folder: Path, run: Run) -> None:
    byte_items = {**BYTE_ITEMS, "iteration": run.progress.step}
    dcp.save({**_weights(run.model), **_moments(run), **byte_items}, checkpoint_id=folder, no_dist=True)
    torch.save(run.progress.state_dict(), folder / TRAIN_STATE)
    torch.save(_run_state(run), folder / _RUN_STATE)
    (folder / RUN_CONFIG).write_text(run.config_yaml)
    # Config, tokenizer and processor go along, so that an export needs nothing else.
    pretrained = run.cfg.checkpoint.pretrained_checkpoint
    if pretrained and (source := find_iteration(Path(pretrained)) / HF_FILES).exists():
        shutil.copytree(source, folder / HF_FILES)


def load_weights(folder: str | Path, model: list[torch.nn.Module]) -> None:
    """Fill a model's weights from a checkpoint, all of them.

    Args:
        folder: the run's or the checkpoint's own.
        model: the wrapped model.

    Raises:
        CheckpointError: a weight is missing, extra or of another shape; all are listed.
    """
    _load_tensors(find_iteration(Path(folder)), _weights(model), prefix=key_of(""))
    _copy_to_parameters(model)


def load(folder: Path, run: Run) -> None:
    """Continue a run from one of its checkpoints: weights, optimizer, schedule, random state, data position."""
    _load_tensors(folder, {**_weights(run.model), **_moments(run)}, prefix=(key_of(""), _OPTIMIZER))
    _copy_to_parameters(run.model)
    _restore_run_state(run, torch.load(folder / _RUN_STATE, weights_only=True))
    run.progress.load_state_dict(torch.load(folder / TRAIN_STATE, weights_only=True))


def _copy_to_parameters(model: list[torch.nn.Module]) -> None:
    """Where the optimizer keeps float32 copies, those were loaded; round them into the model."""
    for _, parameter in _named_parameters(model):
        if hasattr(parameter, "main_param"):
            parameter.data.copy_(parameter.main_param)


def _load_tensors(folder: Path, tensors: dict[str, Tensor], prefix: str | tuple[str, ...]) -> None:
    """Fill `tensors` from a checkpoint that holds exactly them under `prefix`."""
    # Read by our own reader first: it unpickles nothing but descriptions of tensors.
    stored = {key: spec.shape for key, (spec, _) in read_metadata(folder).tensors.items() if key.startswith(prefix)}
    wanted = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    problems = [f"missing: {key} {list(wanted[key])}" for key in sorted(wanted.keys() - stored.keys())]
    problems += [f"unexpected: {key} {list(stored[key])}" for key in sorted(stored.keys() - wanted.keys())]
    problems += [
        f"misshapen: {key} is {list(stored[key])}, expected {list(wanted[key])}"
        for key in sorted(wanted.keys() & stored.keys())
        if stored[key] != wanted[key]
    ]
    if problems:
        raise CheckpointError("\n  ".join([f"{folder} does not fit the model:", *problems]))
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
