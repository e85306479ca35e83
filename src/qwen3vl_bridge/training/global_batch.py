"""The global batch: whether it divides over ranks, and whether rows are assigned to ranks within it.

What lives here: these two checks, for a configuration and for loops. What may not: microbatches of pipeline stages
(`models/common/settings/parallelism.py`).
"""

from __future__ import annotations

from typing import Any


def check_share(cfg: Any, ranks: int) -> int:
    """Refuse a global batch that does not divide over data-parallel ranks.

    Args:
        cfg: the configuration.
        ranks: number of data-parallel ranks.

    Returns:
        Microbatches of each rank.

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
