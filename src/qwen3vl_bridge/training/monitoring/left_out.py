"""Numbers of samples dropped in training, per data set: metrics, and log messages.

What lives here: totals over ranks as metrics. What may not: counting (`data/packing/row_plan.py`, `batch_meter.py`),
why a sample is dropped (`data/processing/filtering.py`).

Samples dropped when they are measured follow from the plan of rows, which is equal in every process: their total comes
with each batch, and ranks differ only in the index of their latest rows. For streams and WebDatasets each process has
its own part of the data, and each batch has the number that is new: data-parallel ranks sum these. The same is done for
samples that turn out to be unreadable when their row is due, which only the ranks that read the row know.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from qwen3vl_bridge.data.packing.set_counts import SetCounts

logger = logging.getLogger(__name__)


class LeftOut:
    """Converts counts per data set to metrics.

    Args:
        dataset: the run's data.
    """

    def __init__(self, dataset: Any) -> None:
        mixed = getattr(dataset, "mixed", None)
        self._names = [one.name for one in mixed("train")] if mixed is not None else []
        self._said = 0

    def numbers(self, counts: SetCounts) -> list[int]:
        """A number for each data set, the same length on every rank."""
        return [*counts, *[0] * (max(len(self._names), 1) - len(counts))]

    def figures(self, dropped: Sequence[float], unreadable: Sequence[int]) -> dict[str, float]:
        """By name: the total, and that of each data set of a mixture. Zeros are omitted.

        Args:
            dropped: per data set, when samples were measured.
            unreadable: per data set, when their rows were due.
        """
        found = {}
        for kind, counts in (("dropped", dropped), ("unreadable", unreadable)):
            found[kind] = int(sum(counts))
            found |= {f"{kind}_{name}": int(count) for name, count in zip(self._names, counts, strict=False)}
        return {name: count for name, count in found.items() if count}

    def say(self, figures: dict[str, float], step: int) -> None:
        """Log the total if it has doubled since the last message."""
        total = figures.get("dropped", 0) + figures.get("unreadable", 0)
        if total and total >= 2 * self._said:
            self._said = total
            words = ", ".join(f"{name} {count}" for name, count in figures.items())
            logger.warning("samples left out of training up to step %d: %s", step, words)
