"""How many samples training has done without, of each set of the data: figures, and words for the log.

What lives here: totals over ranks as figures. What may not: counting (`data/packing/row_plan.py`, `batch_meter.py`),
why a sample is left out (`data/processing/filtering.py`).

What is dropped when it is measured follows from the plan of rows, which is the same in every process: it comes with
each batch, as the number by then, and ranks differ only in how far their latest rows are. Of streams and of WebDatasets
each process has a part of its own, and of it a number that is new with each batch: data-parallel ranks add these up.
So they do with what proves unreadable when its row is due, which is known to those who read the row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from qwen3vl_bridge.data.packing.set_counts import SetCounts

logger = logging.getLogger(__name__)


class LeftOut:
    """Turns counts of sets into figures.

    Args:
        dataset: the run's data.
    """

    def __init__(self, dataset: Any) -> None:
        mixed = getattr(dataset, "mixed", None)
        self._names = [one.name for one in mixed("train")] if mixed is not None else []
        self._said = 0

    def numbers(self, counts: SetCounts) -> list[int]:
        """A number for each set, as many on every rank."""
        return [*counts, *[0] * (max(len(self._names), 1) - len(counts))]

    def figures(self, dropped: Sequence[float], unreadable: Sequence[int]) -> dict[str, float]:
        """By name: all of them, and those of each set of a mixture. What is 0 is no figure.

        Args:
            dropped: of each set, when samples were measured.
            unreadable: of each set, when their rows were due.
        """
        found = {}
        for kind, counts in (("dropped", dropped), ("unreadable", unreadable)):
            found[kind] = int(sum(counts))
            found |= {f"{kind}_{name}": int(count) for name, count in zip(self._names, counts, strict=False)}
        return {name: count for name, count in found.items() if count}

    def say(self, figures: dict[str, float], step: int) -> None:
        """Log the total where it has doubled since it was said."""
        total = figures.get("dropped", 0) + figures.get("unreadable", 0)
        if total and total >= 2 * self._said:
            self._said = total
            words = ", ".join(f"{name} {count}" for name, count in figures.items())
            logger.warning("samples left out of training up to step %d: %s", step, words)
