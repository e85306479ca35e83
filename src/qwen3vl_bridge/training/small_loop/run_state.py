"""What of a run is in no tensor: counts, schedule, random generators, the position in the data.

What lives here: the file that holds it, and going on from it. What may not: tensors, names of files that Megatron's
loaders look for (`checkpoint/formats/megatron/folder.py`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.parallel.collectives import hear_all
from qwen3vl_bridge.training.checkpointing.all_or_none import is_first, together
from qwen3vl_bridge.training.checkpointing.optimizer_state import set_steps, steps_of
from qwen3vl_bridge.training.small_loop.random_states import random_states, restore_random_states, seed_anew, split_of
from qwen3vl_bridge.training.small_loop.schedule import restore_schedule

import torch

if TYPE_CHECKING:
    from qwen3vl_bridge.training.small_loop.setup import Run

logger = logging.getLogger(__name__)

# What Megatron's formats have no place for.
_FILE = "run_state.pt"


def save_run_state(folder: Path, run: Run) -> None:
    """Write it: random states of every rank, of the rest what all have in common.

    Args:
        folder: that the first rank writes to.
        run: as it stands.
    """
    settings = run.cfg.checkpoint
    with together():
        mine = {
            "steps": steps_of(run.optimizer) if settings.save_optim else None,
            "random": random_states() if settings.save_rng else None,
        }
    ranks = hear_all(mine)
    with together():
        if is_first():
            state = {
                "optimizer_step": max(rank["steps"] for rank in ranks) if settings.save_optim else None,
                "scheduler": run.scheduler.state_dict(),
                "stream": run.stream.state_dict(),
                "split": split_of(run.groups, run.cfg.model),
                "random": [rank["random"] for rank in ranks] if settings.save_rng else None,
            }
            torch.save(state, folder / _FILE)


def read_run_state(folder: Path) -> dict[str, Any]:
    """What `save_run_state` wrote.

    Raises:
        CheckpointError: there is nothing, as the folder is no run's of this loop.
    """
    if not (folder / _FILE).is_file():
        raise CheckpointError(
            f"{folder} has no {_FILE}: it is no checkpoint of a run in this loop, which could be continued. To start "
            "from its weights, name it as checkpoint.pretrained_checkpoint"
        )
    return torch.load(folder / _FILE, weights_only=True)


def restore_run_state(saved: dict[str, Any], run: Run) -> None:
    """Go on from it, as far as the configuration says.

    Args:
        saved: from `read_run_state`.
        run: assembled, with its progress and its optimizer's tensors loaded.

    Raises:
        CheckpointError: the schedule is another one.
        ValueError: the data are others.
    """
    settings = run.cfg.checkpoint
    if settings.load_optim:
        set_steps(run.optimizer, saved["optimizer_step"])
        restore_schedule(run.scheduler, saved["scheduler"], run.cfg.train.global_batch_size)
    run.stream.load_state_dict(saved["stream"])
    if not settings.load_rng:
        return
    split = split_of(run.groups, run.cfg.model)
    if saved["random"] is not None and saved["split"] == split:
        restore_random_states(saved["random"][torch.distributed.get_rank()])
        return
    was = "has no random states" if saved["random"] is None else f"was saved by ranks split as {saved['split']}"
    if is_first():
        logger.warning("the checkpoint %s, these are split as %s: random states are left out", was, split)
    seed_anew(run.cfg.rng.seed, run.progress.step, run.groups)
