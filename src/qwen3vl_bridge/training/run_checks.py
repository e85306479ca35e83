"""Refuses settings that a run could not follow, or that would end it late: batches, schedules, host memory, signals.

`Qwen3VLConfigContainer.validate` calls these checks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.loading.worker_processes import end_workers_at_exit
from qwen3vl_bridge.data.row_settings import ConversationRows
from qwen3vl_bridge.planning.from_config import plan_of
from qwen3vl_bridge.planning.hardware import GIB

import torch
from megatron.bridge.data.builders.energon import EnergonDatasetConfig
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.common_utils import get_world_size_safe

logger = logging.getLogger(__name__)

# Files with a container's memory limit, in the second and the first version of control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_share(cfg: Any, ranks: int) -> int:
    """The microbatches of each of the data-parallel ranks.

    Raises:
        ValueError: a global batch that is not a multiple of ranks times micro_batch_size.
    """
    rows, share = cfg.train.global_batch_size, cfg.train.micro_batch_size * ranks
    if rows % share:
        raise ValueError(
            f"train.global_batch_size is {rows}, expected a multiple of {share}: train.micro_batch_size times {ranks} "
            "data-parallel ranks"
        )
    return rows // share


def check_balance(cfg: Any) -> None:
    """Refuse rows assigned over several steps: which rows a step has would depend on the number of ranks.

    Raises:
        ValueError: the global batch is not a multiple of `balance_over`, or its size is ramped up.
    """
    if (over := getattr(cfg.dataset, "balance_over", None)) is None:
        return
    rows, ramp = cfg.train.global_batch_size, cfg.train.rampup_batch_size
    if rows % over or ramp is not None:
        ramped = "" if ramp is None else f", rampup_batch_size {ramp}"
        raise ValueError(
            f"dataset.balance_over is {over} with train.global_batch_size {rows}{ramped}, expected the global batch "
            f"size, and that must be constant: set dataset.balance_over={rows} too"
        )


def check_schedule(cfg: ConfigContainer) -> None:
    """Refuse a schedule without start and end values, which are None in Megatron-Bridge and compared by megatron-core;
    and a warm-up that is as long as the schedule, such as a recipe's in a shortened run.

    Megatron-Bridge shortens such a warm-up to one sample less, and the rate reaches `optimizer.lr` in the last step or
    never.

    Raises:
        ValueError: one of them is None, or the warm-up is too long.
    """
    schedule, kind = cfg.scheduler, "iters" if cfg.train.train_samples is None else "samples"
    values = {
        "optimizer.lr": cfg.optimizer.lr,
        "optimizer.min_lr": cfg.optimizer.min_lr,
        "scheduler.start_weight_decay": schedule.start_weight_decay,
        "scheduler.end_weight_decay": schedule.end_weight_decay,
    }
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(
            f"{', '.join(missing)}: found None, expected numbers, such as optimizer.min_lr=0.0 and "
            f"scheduler.start_weight_decay=scheduler.end_weight_decay={cfg.optimizer.weight_decay}"
        )
    lengths = {
        "scheduler.max_steps": schedule.max_steps if kind == "iters" else None,
        f"scheduler.lr_decay_{kind}": getattr(schedule, f"lr_decay_{kind}"),
        f"train.train_{kind}": getattr(cfg.train, f"train_{kind}"),
    }
    name, length = next(((name, value) for name, value in lengths.items() if value is not None), ("", None))
    warmup, wanted = f"scheduler.lr_warmup_{kind}", getattr(schedule, f"lr_warmup_{kind}")
    if schedule.lr_warmup_fraction is not None and schedule.lr_warmup_fraction >= 1:
        raise ValueError(f"scheduler.lr_warmup_fraction is {schedule.lr_warmup_fraction}, expected less than 1")
    if length is not None and wanted >= length > 0 and wanted:
        raise ValueError(
            f"{warmup} is {wanted} with {name} {length}: the learning rate would still be warming up at the end and "
            f"never reach optimizer.lr; expected less than {length}, such as {warmup}={length // 20}, or, for the "
            f"first part of a longer run, that run's length as scheduler.lr_decay_{kind}"
        )


def check_host_memory(cfg: ConfigContainer) -> None:
    """Refuse a run on GPUs whose hosts lack the memory that ranks need to save the optimizer by parameters.

    A run that the planner does not support is not checked.

    Raises:
        ValueError: too little memory.
    """
    settings = cfg.checkpoint
    gathers = (
        settings.dist_ckpt_optim_fully_reshardable and settings.save_optim and settings.ckpt_format == "torch_dist"
    )
    if not (settings.save and gathers and torch.cuda.is_available()):
        return
    world = get_world_size_safe()
    try:
        saving = plan_of(cfg, world).saving
    except ValueError:
        return
    ranks, room = min(world, torch.cuda.device_count()), host_bytes()
    needed = saving.host_total
    if saving.host_gathered and ranks * needed > room:
        raise ValueError(
            f"saving a checkpoint takes {needed / GIB:.1f} GiB of host memory on each of {ranks} ranks, and this "
            f"machine has {room / GIB:.1f} GiB: expected checkpoint.dist_ckpt_optim_fully_reshardable False, with "
            f"which it takes {saving.host_written / GIB:.1f} GiB a rank, and the run can be resumed only with the same "
            "TP, PP and EP"
        )


def host_bytes() -> int:
    """Memory in bytes of this machine, or of the container that this process is in."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file
            room = min(room, int(path.read_text()))
    return room


def leave_exit_signal_to_run(cfg: ConfigContainer) -> None:
    """Let workers of our data sets ignore the signal that asks a run to save and exit, and warn if workers would end a
    run before it can save. A second call has no effect.
    """
    number = int(cfg.train.exit_signal) if cfg.train.exit_signal_handler_for_dataloader else None
    if isinstance(cfg.dataset, ConversationRows):
        cfg.dataset.ignored_signal = number
    if number is not None:
        end_workers_at_exit()  # also those of Megatron-Bridge's own loaders
    if not cfg.train.exit_signal_handler or not getattr(cfg.dataset, "num_workers", 0):
        return
    ends = "launchers send them the signal too, it terminates them, and the run fails before it can save"
    if not cfg.train.exit_signal_handler_for_dataloader:
        logger.warning(
            "train.exit_signal_handler is on, but not for the %d processes that read ahead: %s; set "
            "train.exit_signal_handler_for_dataloader=true, or dataset.num_workers=0",
            *(cfg.dataset.num_workers, ends),
        )
    elif isinstance(cfg.dataset, EnergonDatasetConfig):
        logger.warning(
            "train.exit_signal_handler_for_dataloader has no effect on the loaders of EnergonDatasetConfig: %s; set "
            "dataset.num_workers=0, or use Qwen3VLEnergonProvider",
            ends,
        )
