"""Keep the checkpoint with the best value of a metric (`checkpoint.keep_best`).

The values are those of `metrics.jsonl`, which has the metrics of each evaluation, and the steps are those of the
checkpoints in the folder. So a resumed run continues where it was, and a checkpoint that was removed by hand is
forgotten. `best_checkpoint.json` names the best checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from qwen3vl_bridge.core.atomic import replace_file
from qwen3vl_bridge.training.run_log import read_metrics

BEST = "best_checkpoint.json"


def find_best(folder: Path, metric: str, saved: Collection[int]) -> tuple[int, float] | None:
    """Return the step and value of the best checkpoint of a run; None if no checkpoint was evaluated.

    The best loss is the lowest, the best value of another metric the highest. Of equal ones the first is taken.

    Args:
        folder: folder of the run.
        metric: key of an evaluation in `metrics.jsonl`.
        saved: steps of the checkpoints in the folder.
    """
    sign = 1 if metric.endswith("loss") else -1
    values = {int(entry["step"]): entry.get(metric) for entry in read_metrics(folder)}
    found = [(step, value) for step, value in values.items() if value is not None and step in saved]
    return min(found, key=lambda one: (sign * one[1], one[0])) if found else None


def record_best(folder: Path, metric: str, saved: Mapping[int, Path]) -> Path | None:
    """Write `best_checkpoint.json` and return the best checkpoint's folder; None if no checkpoint was evaluated.

    `saved` contains the folder of each checkpoint by its step. The others are those of `find_best`.
    """
    if (best := find_best(folder, metric, saved)) is None:
        return None
    step, value = best
    content = {"checkpoint": saved[step].name, "step": step, "metric": metric, "value": value}
    replace_file(folder / BEST, (json.dumps(content, indent=2) + "\n").encode())
    return saved[step]
