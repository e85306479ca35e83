"""The schedule of a resumed run: learning rate and weight decay, by the configuration or by the checkpoint.

What lives here: telling whether both agree, and which one counts where they don't. What may not: the schedule itself,
which is megatron-core's.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.files.errors import CheckpointError

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# What megatron-core keeps of a schedule, by the settings it comes from. Steps are counted in samples.
_SETTINGS = {
    "max_lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "lr_warmup_steps": "scheduler.lr_warmup_iters (or lr_warmup_fraction)",
    "lr_decay_steps": "scheduler.lr_decay_iters (train.train_iters unless it is set)",
    "lr_decay_style": "scheduler.lr_decay_style",
    "start_wd": "scheduler.start_weight_decay",
    "end_wd": "scheduler.end_weight_decay",
    "wd_incr_steps": "train.train_iters",
    "wd_incr_style": "scheduler.weight_decay_incr_style",
}
_IN_SAMPLES = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")


def restore_schedule(scheduler: OptimizerParamScheduler, saved: dict[str, Any], global_batch_size: int) -> None:
    """Go on with a schedule.

    Args:
        scheduler: made by the configuration; it has made no step.
        saved: its `state_dict` from a checkpoint.
        global_batch_size: of this run.

    Raises:
        CheckpointError: both differ, and the configuration does not say which one counts.
    """
    found = scheduler.state_dict()
    differ = [name for name in _SETTINGS if name in saved and found[name] != saved[name]]
    if differ and not (scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler):
        lines = [_line(name, found[name], saved[name], global_batch_size) for name in differ]
        raise CheckpointError(
            "\n  ".join(["the schedule is not the checkpoint's:", *lines])
            + "\nset scheduler.override_opt_param_scheduler=true to go on with the settings, or "
            "scheduler.use_checkpoint_opt_param_scheduler=true to go on with the checkpoint's schedule"
        )
    if scheduler.use_checkpoint_opt_param_scheduler:
        _use_rates_of(scheduler, saved)
    scheduler.load_state_dict(saved)


def _use_rates_of(scheduler: OptimizerParamScheduler, saved: dict[str, Any]) -> None:
    """Groups of parameters have the rates for themselves; those that are as the settings say follow the checkpoint."""
    for group in scheduler.optimizer.param_groups:
        for name in ("max_lr", "min_lr"):
            if group.get(name) == getattr(scheduler, name):
                group[name] = saved[name]


def _line(name: str, found: Any, saved: Any, global_batch_size: int) -> str:
    if name in _IN_SAMPLES:
        found, saved = (f"{value / global_batch_size:g} steps of {global_batch_size} rows" for value in (found, saved))
    return f"{_SETTINGS[name]}: found {found}, the checkpoint has {saved}"
