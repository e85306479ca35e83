"""Refuses schedules of the learning rate and of weight decay that a run could not follow, before it starts.

What lives here: these checks. What may not: the schedule of a resumed run (`training/checkpointing/schedules.py`),
rates of the model's parts (`tower_settings.py`).
"""

from __future__ import annotations

from megatron.bridge.training.config import ConfigContainer


def check_is_set(cfg: ConfigContainer) -> None:
    """Refuse a schedule without start and end values, which are None in Megatron-Bridge; megatron-core compares them.

    Args:
        cfg: the run's configuration.

    Raises:
        ValueError: one of them is None.
    """
    values = {
        "optimizer.lr": cfg.optimizer.lr,
        "optimizer.min_lr": cfg.optimizer.min_lr,
        "scheduler.start_weight_decay": cfg.scheduler.start_weight_decay,
        "scheduler.end_weight_decay": cfg.scheduler.end_weight_decay,
    }
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(
            f"{', '.join(missing)}: found None, expected numbers, such as optimizer.min_lr=0.0 and "
            f"scheduler.start_weight_decay=scheduler.end_weight_decay={cfg.optimizer.weight_decay}"
        )


def check_warmup(cfg: ConfigContainer) -> None:
    """Refuse a warm-up that is as long as the schedule, such as a recipe's in a shortened run.

    Megatron-Bridge shortens it to one sample less, and the rate reaches `optimizer.lr` in the last step or never.

    Args:
        cfg: a run's.

    Raises:
        ValueError: the warm-up is too long.
    """
    schedule, kind = cfg.scheduler, "iters" if cfg.train.train_samples is None else "samples"
    lengths = {
        "scheduler.max_steps": schedule.max_steps if kind == "iters" else None,
        f"scheduler.lr_decay_{kind}": getattr(schedule, f"lr_decay_{kind}"),
        f"train.train_{kind}": getattr(cfg.train, f"train_{kind}"),
    }
    name, length = next(((name, found) for name, found in lengths.items() if found is not None), ("", None))
    warmup, wanted = f"scheduler.lr_warmup_{kind}", getattr(schedule, f"lr_warmup_{kind}")
    if schedule.lr_warmup_fraction is not None and schedule.lr_warmup_fraction >= 1:
        raise ValueError(f"scheduler.lr_warmup_fraction is {schedule.lr_warmup_fraction}, expected less than 1")
    if length is not None and wanted >= length > 0 and wanted:
        raise ValueError(
            f"{warmup} is {wanted} with {name} {length}: the learning rate would still be warming up at the end and "
            f"never reach optimizer.lr; expected less than {length}, such as {warmup}={length // 20}, or, for the "
            f"first part of a longer run, that run's length as scheduler.lr_decay_{kind}"
        )
