"""Training checkpoints: weights, optimizer, schedule, random states and data position, in either of Megatron's formats.

What lives here: saving a run, finding its checkpoints, going on from one. What may not: tensors
(`training/checkpointing/fsdp_dtensor.py`, `training/checkpointing/torch_dist.py`), what is in no tensor
(`run_state.py`), names of files and how a folder comes into being (`qwen3vl_bridge.checkpoint`).

A run that trains adapters saves these, and whatever else it trains; its first weights stay where they are.

Every rank writes its part. A folder is written beside its place and moved there when it is whole; only then do the
tracker files name it, and only after that do older ones go.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_bridge.checkpoint.adapters.settings import check_same_adapters
from qwen3vl_bridge.checkpoint.formats.dcp.metadata import FILE as METADATA
from qwen3vl_bridge.checkpoint.formats.megatron.folder import (
    LATEST_TRAIN_STATE,
    RUN_CONFIG,
    TORCH_DIST,
    TRACKER,
    TRAIN_STATE,
    find_iteration,
    iteration_folder,
)
from qwen3vl_bridge.files.atomic import replace_file
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.parallel.collectives import tell_all
from qwen3vl_bridge.training.checkpointing import fsdp_dtensor, torch_dist
from qwen3vl_bridge.training.checkpointing.all_or_none import is_first, staged_together, together
from qwen3vl_bridge.training.checkpointing.weight_loading import Pretrained, load_tensors
from qwen3vl_bridge.training.small_loop.run_state import read_run_state, restore_run_state, save_run_state

import torch
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.utils.checkpoint_utils import is_hf_checkpoint_dir

if TYPE_CHECKING:
    from qwen3vl_bridge.training.small_loop.setup import Run

logger = logging.getLogger(__name__)

_REMOVED = ".removed"


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint of a run, or None where there is none yet.

    Raises:
        CheckpointError: the tracker names a checkpoint that is not there.
    """
    folder = Path(folder)
    return find_iteration(folder) if (folder / TRACKER).exists() or (folder / METADATA).exists() else None


def begin(run: Run, pretrained: Pretrained | None) -> None:
    """Load the checkpoint that the run goes on from, or else first weights. Every rank calls this.

    Args:
        run: assembled, with its data.
        pretrained: first weights; None for those that the model was made with.

    Raises:
        CheckpointError: a checkpoint that is not there, or does not fit the run.
        ValueError: data that are others.
    """
    settings, found = run.cfg.checkpoint, None
    with together():
        if is_first():
            found = _to_load(settings)
    found = tell_all(found)
    run.origin = pretrained or (found and Pretrained(found, is_hf=False))
    if found is None:
        # Under adapters they are there already.
        if pretrained is not None and run.cfg.peft is None:
            pretrained.load(run.model, run.groups)
    elif settings.finetune:
        with together():
            check_same_adapters(found, run.cfg.peft)
        load_tensors(found, run.model, None, run.groups, run.cfg.peft)
    else:
        load(found, run)
        logger.info("resumed from %s at step %d", found, run.progress.step)


def _to_load(settings: CheckpointConfig) -> Path | None:
    if not settings.load:
        return None
    folder = Path(settings.load)
    if is_hf_checkpoint_dir(settings.load):
        raise CheckpointError(
            f"checkpoint.load is {folder}, Hugging Face weights: expected the folder of a run, and first weights as "
            "checkpoint.pretrained_checkpoint"
        )
    found = find_iteration(folder, settings.ckpt_step) if settings.ckpt_step is not None else latest(folder)
    if found is None and settings.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"checkpoint.load is {folder}, which has no checkpoint; expected one, or exit_on_missing_checkpoint=false"
        )
    return found


def save(folder: str | Path, run: Run) -> Path:
    """Write a checkpoint of the run as it stands and make it the newest. Every rank calls this.

    Args:
        folder: of the run; the checkpoint becomes `iter_<step>` in it.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: a rank could not write; the checkpoints that were there are as they were.
    """
    folder, step = Path(folder), run.progress.step
    final = iteration_folder(folder, step)
    # One of this step is there where a run was resumed from before it; it is replaced in one move.
    with staged_together(final) as aside:
        _write(aside, run)
    with together():
        if is_first():
            replace_file(folder / LATEST_TRAIN_STATE, (final / TRAIN_STATE).read_bytes())
            replace_file(folder / TRACKER, str(step).encode())
            _remove_older(folder, run)
    return final


def _write(folder: Path, run: Run) -> None:
    settings = run.cfg.checkpoint
    if settings.ckpt_format == TORCH_DIST:
        torch_dist.save(folder, run)
    else:
        optimizer = run.optimizer if settings.save_optim else None
        fsdp_dtensor.save(folder, run.model, optimizer, run.groups, run.progress.step, run.cfg.peft)
    save_run_state(folder, run)
    with together():
        if is_first():
            torch.save(run.progress.state_dict(), folder / TRAIN_STATE)
            (folder / RUN_CONFIG).write_text(run.config_yaml)
            if run.origin is not None:
                run.origin.travel_along(folder, run.cfg.model)


def _remove_older(folder: Path, run: Run) -> None:
    """Remove all but the newest checkpoints up to the run's step, and never the one that first weights came from."""
    keep = run.cfg.checkpoint.most_recent_k
    if keep is None or keep < 0:
        return
    found = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"iter_(\d{7,})", path.name))}
    for number in sorted(number for number in found if number <= run.progress.step)[:-keep]:
        path = found[number]
        if run.origin is None or not path.samefile(run.origin.folder):
            # Out of its name first, so that nothing half gone can be taken for a checkpoint.
            path.rename(path.with_name(f".{path.name}{_REMOVED}"))
            logger.info("removed %s, older than the newest %d", path, keep)
    for path in folder.glob(f".iter_*{_REMOVED}"):  # also those that a process left when it died
        shutil.rmtree(path)


def load(folder: Path, run: Run) -> None:
    """Continue a run from one of its checkpoints, of either format, saved by ranks split in any way.

    Weights, optimizer, schedule, random states and data position; `checkpoint.load_optim=false` leaves optimizer and
    schedule as they are, `load_rng=false` random states.

    Raises:
        CheckpointError: a checkpoint that does not fit the run, or a schedule that is another one.
        ValueError: data that are others.
    """
    peft = run.cfg.peft
    with together():
        saved = read_run_state(folder)
        check_same_adapters(folder, peft)
        if run.cfg.checkpoint.load_optim and saved["optimizer_step"] is None:
            raise CheckpointError(
                f"{folder} was saved without the optimizer (checkpoint.save_optim=false): expected "
                "checkpoint.load_optim=false, to begin with a new one"
            )
    load_tensors(folder, run.model, run.optimizer if run.cfg.checkpoint.load_optim else None, run.groups, peft)
    with together():
        run.progress.load_state_dict(torch.load(folder / TRAIN_STATE, weights_only=True))
        restore_run_state(saved, run)
