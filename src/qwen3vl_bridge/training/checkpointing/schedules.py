"""The learning rates of a resumed run: from the configuration or from the checkpoint.

What lives here: whether both agree, and which one is used if they differ. What may not: the schedule itself, which is
megatron-core's.

megatron-core identifies groups of parameters by their maximum and minimum rates, among others. So an optimizer finds
none of its groups in a checkpoint with other rates, or continues with those of the checkpoint whatever the
configuration says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.megatron.folder import RUN_CONFIG
from qwen3vl_bridge.files.errors import CheckpointError

from megatron.bridge.training.checkpointing import CheckpointLoadContext
from megatron.bridge.training.utils.checkpoint_utils import read_run_config

_CHOOSE = (
    "set scheduler.override_opt_param_scheduler=true to use the settings, or "
    "scheduler.use_checkpoint_opt_param_scheduler=true to use the checkpoint's schedule"
)


@contextlib.contextmanager
def chosen_schedule(ctx: CheckpointLoadContext, folder: Path | None) -> Iterator[None]:
    """Let a run load its optimizer and schedule in the body, and continue with the rates that the configuration
    chooses.

    Args:
        ctx: Megatron-Bridge's; a collective call.
        folder: the checkpoint's; None if it is unknown.

    Raises:
        CheckpointError: both differ, and the configuration does not say which one to use.
    """
    cfg, scheduler = ctx.state.cfg, ctx.opt_param_scheduler
    ours = cfg.optimizer.lr, cfg.optimizer.min_lr
    theirs = ours if folder is None or ctx.optimizer is None else _saved_rates(folder, ours)
    loads = cfg.checkpoint.load_optim and not cfg.checkpoint.finetune
    if not loads or theirs == ours or scheduler is None:
        with _explained():
            yield
        return
    if not (scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler):
        raise CheckpointError(
            f"the learning-rate schedule differs from the checkpoint's: optimizer.lr and optimizer.min_lr are {ours}, "
            "the checkpoint has "
            f"{theirs}; {_CHOOSE}"
        )
    _rename(ctx, ours, theirs)
    with _explained():
        yield
    if scheduler.override_opt_param_scheduler:
        _rename(ctx, theirs, ours)
        scheduler.step(increment=0)


def _saved_rates(folder: Path, otherwise: tuple) -> tuple:
    if not (folder / RUN_CONFIG).is_file():
        return otherwise
    saved = read_run_config(str(folder / RUN_CONFIG)).get("optimizer") or {}
    return saved.get("lr", otherwise[0]), saved.get("min_lr", otherwise[1])


def _rename(ctx: CheckpointLoadContext, before: tuple, after: tuple) -> None:
    for one in getattr(ctx.optimizer, "chained_optimizers", [ctx.optimizer]):
        for group in one.param_groups:
            if (group.get("max_lr"), group.get("min_lr")) == before:
                group["max_lr"], group["min_lr"] = after


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Add what to set to megatron-core's assertion that a schedule is the checkpoint's.

    Raises:
        CheckpointError: the schedule differs.
    """
    try:
        yield
    except AssertionError as error:
        if "OptimizerParamScheduler" not in str(error):
            raise
        raise CheckpointError(
            f"the learning-rate schedule differs from the checkpoint's: {error} (it counts samples: iterations times "
            f"train.global_batch_size); {_CHOOSE}"
        ) from error
