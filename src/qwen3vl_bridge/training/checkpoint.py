"""Training checkpoints: weights, optimizer, schedule, random state and data position, in the fsdp_dtensor layout.

What lives here: which tensors and states a run has and how they are named on disk, and putting a finished checkpoint
in place. What may not: conversion from and to Hugging Face (`qwen3vl_bridge.checkpoint`).

A folder is written beside its place under a hidden name, and moved there when it is whole; only then do the tracker
files name it. So what is named is complete, whenever the process dies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_bridge import mappings
from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.provider import Qwen3VLModelProvider

import torch
import torch.distributed.checkpoint as dcp
from megatron.bridge.training.config import ConfigContainer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch import Tensor

if TYPE_CHECKING:
    from qwen3vl_bridge.training.loop import Run

_TRACKER = "latest_checkpointed_iteration.txt"
_TRAIN_STATE = "train_state.pt"
_LATEST_TRAIN_STATE = "latest_train_state.pt"
_RUN_STATE = "run_state.pt"
# Folders and files that go along from the checkpoint training started with, so that an export finds them.
_COMPANIONS = ("hf",)
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _rows_by_name(provider: Qwen3VLModelProvider) -> dict[str, mappings.Row]:
    """The table's rows under the parameter names of the model's layer spec."""
    dimensions = {
        "text_layers": provider.num_layers,
        "vision_layers": provider.vision_config.depth,
        "deepstack_taps": len(provider.vision_config.deepstack_visual_indexes),
        "attention_bias": provider.add_qkv_bias,
        "untied": not provider.share_embeddings_and_output_weights,
    }
    local = provider.transformer_impl == "local"
    rows = mappings.expand(mappings.DENSE_ROWS, dimensions)
    return {mappings.local_name(row.megatron) if local else row.megatron: row for row in rows}


def _named_parameters(model: list[torch.nn.Module]) -> Iterator[tuple[mappings.Row, torch.nn.Parameter]]:
    (bare,) = unwrap_model(model)
    rows = _rows_by_name(bare.config)
    for name, parameter in bare.named_parameters():
        yield rows[name], parameter


def _parts(row: mappings.Row, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a parameter-shaped tensor is stored as; the parts are views of it."""
    yield from zip(row.stored, tensor.chunk(len(row.stored)), strict=True)


def _weights(model: list[torch.nn.Module]) -> dict[str, Tensor]:
    """Every weight as stored, in float32 where the optimizer keeps such a copy. Views: loading fills the model."""
    return {
        f"model.module.{name}": part
        for row, parameter in _named_parameters(model)
        for name, part in _parts(row, getattr(parameter, "main_param", parameter).detach())
    }


def _moments(run: Run) -> dict[str, Tensor]:
    """The optimizer's tensors as stored, made as zeros for parameters it has not stepped yet."""
    state = _adam(run).state
    tensors = {}
    for row, parameter in _named_parameters(run.model):
        if not parameter.requires_grad:
            continue
        main = getattr(parameter, "main_param", parameter)
        state[main].setdefault("step", torch.zeros(()))
        for moment in _MOMENTS:
            values = state[main].setdefault(moment, torch.zeros_like(main, dtype=torch.float32))
            for name, part in _parts(row, values):
                tensors[f"optimizer.state.module.module.module.{name}.{moment}"] = part
    return tensors


def _adam(run: Run) -> torch.optim.Optimizer:
    optimizers = getattr(run.optimizer, "chained_optimizers", [run.optimizer])
    if len(optimizers) != 1:
        raise NotImplementedError(f"the run has {len(optimizers)} optimizers, expected 1")
    return optimizers[0].optimizer


def _run_state(run: Run) -> dict:
    steps = [int(s["step"]) for s in _adam(run).state.values() if "step" in s]
    return {
        "optimizer_step": max(steps, default=0),
        "scheduler": run.scheduler.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "tracked_rng": get_cuda_rng_tracker().get_states(),
        "stream": run.stream.state_dict(),
    }


def _restore_run_state(run: Run, saved: dict) -> None:
    for state in _adam(run).state.values():
        state["step"] = torch.tensor(float(saved["optimizer_step"]))
    run.scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["torch_rng"])
    get_cuda_rng_tracker().set_states(saved["tracked_rng"])
    run.stream.load_state_dict(saved["stream"])


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or None where there is none yet.

    Raises:
        CheckpointError: the tracker names a checkpoint that is not there.
    """
    folder = Path(folder)
    tracker = folder / _TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    found = folder / f"iter_{int(text):07d}" if text.isdigit() else None
    if found is None or not (found / ".metadata").exists():
        raise CheckpointError(f"{tracker} says {text!r}, expected the number of a checkpoint in {folder}")
    return found


def save(folder: str | Path, run: Run) -> Path:
    """Write a checkpoint of the run as it stands and make it the newest.

    Args:
        folder: of the run; the checkpoint becomes `iter_<step>` in it.

    Returns:
        The checkpoint's folder.
    """
    folder, step = Path(folder), run.progress.step
    final, aside = folder / f"iter_{step:07d}", folder / f".iter_{step:07d}.unfinished"
    first = torch.distributed.get_rank() == 0
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    torch.distributed.barrier()
    constants = {"checkpoint_version": 3.0, "iteration": step, "args": None}
    dcp.save({**_weights(run.model), **_moments(run), **constants}, checkpoint_id=aside)
    if first:
        torch.save(run.progress.state_dict(), aside / _TRAIN_STATE)
        torch.save(_run_state(run), aside / _RUN_STATE)
        (aside / "run_config.yaml").write_text(run.config_yaml)
        _copy_companions(run.cfg, aside)
        _put_in_place(folder, aside, final, step)
    torch.distributed.barrier()
    return final


def _copy_companions(cfg: ConfigContainer, aside: Path) -> None:
    source = cfg.checkpoint.pretrained_checkpoint
    for name in _COMPANIONS if source else ():
        found = _iteration(Path(source)) / name
        if found.exists():
            shutil.copytree(found, aside / name)


def _put_in_place(folder: Path, aside: Path, final: Path, step: int) -> None:
    for file in aside.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    shutil.rmtree(final, ignore_errors=True)  # of this step, from a run that was resumed from before it
    aside.rename(final)
    _replace(folder / _LATEST_TRAIN_STATE, (final / _TRAIN_STATE).read_bytes())
    _replace(folder / _TRACKER, str(step).encode())


def _replace(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.unfinished")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def _iteration(folder: Path) -> Path:
    """A checkpoint's own folder, given that or its run's."""
    if (folder / ".metadata").exists():
        return folder
    found = latest(folder) if folder.is_dir() else None
    if found is None:
        raise CheckpointError(f"{folder} is no fsdp_dtensor checkpoint: it has neither .metadata nor {_TRACKER}")
    return found


def load_weights(folder: str | Path, model: list[torch.nn.Module]) -> None:
    """Fill a model's weights from a checkpoint, all of them.

    Args:
        folder: the run's or the checkpoint's own.
        model: the wrapped model.

    Raises:
        CheckpointError: a weight is missing, extra or of another shape; all are listed.
    """
    _load_tensors(_iteration(Path(folder)), _weights(model), prefix="model.")
    _copy_to_parameters(model)


def load(folder: Path, run: Run) -> None:
    """Continue a run from one of its checkpoints: weights, optimizer, schedule, random state, data position."""
    _load_tensors(folder, {**_weights(run.model), **_moments(run)}, prefix=("model.", "optimizer."))
    _copy_to_parameters(run.model)
    _restore_run_state(run, torch.load(folder / _RUN_STATE, weights_only=True))
    run.progress.load_state_dict(torch.load(folder / _TRAIN_STATE, weights_only=True))


def _copy_to_parameters(model: list[torch.nn.Module]) -> None:
    """Where the optimizer keeps float32 copies, those were loaded; round them into the model."""
    for _, parameter in _named_parameters(model):
        if hasattr(parameter, "main_param"):
            parameter.data.copy_(parameter.main_param)


def _load_tensors(folder: Path, tensors: dict[str, Tensor], prefix: str | tuple[str, ...]) -> None:
    reader = dcp.FileSystemReader(folder)
    stored = {
        name: tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and hasattr(entry, "size")
    }
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"missing: {name} {list(wanted[name])}" for name in sorted(wanted.keys() - stored.keys())]
    problems += [f"unexpected: {name} {list(stored[name])}" for name in sorted(stored.keys() - wanted.keys())]
    problems += [
        f"misshapen: {name} is {list(stored[name])}, expected {list(wanted[name])}"
        for name in sorted(wanted.keys() & stored.keys())
        if stored[name] != wanted[name]
    ]
    if problems:
        raise CheckpointError("\n  ".join([f"{folder} does not fit the model:", *problems]))
    dcp.load(tensors, storage_reader=reader)
