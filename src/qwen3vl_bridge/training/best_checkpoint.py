"""Record the checkpoint with the best value of a metric (`checkpoint.keep_best`) in `best_checkpoint.json`.

Values are read from `metrics.jsonl`, which has an entry for each evaluation. Only the steps of checkpoints that are in
the folder are compared. So the result does not depend on interruptions of the run, and a checkpoint that was removed by
hand is ignored.
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

    The lowest loss is the best. For other metrics, the highest value is the best. Among equal values, the earliest step
    is returned.

    Args:
        folder: folder of the run.
        metric: name of a metric in the entries of `metrics.jsonl`.
        saved: steps of the checkpoints in the folder.
    """
    sign = 1 if metric.endswith("loss") else -1
    values = {int(entry["step"]): entry.get(metric) for entry in read_metrics(folder)}
    found = [(step, value) for step, value in values.items() if value is not None and step in saved]
    return min(found, key=lambda one: (sign * one[1], one[0])) if found else None


def record_best(folder: Path, metric: str, saved: Mapping[int, Path]) -> Path | None:
    """Write `best_checkpoint.json` and return the best checkpoint's folder; None if no checkpoint was evaluated.

    Args:
        folder: folder of the run.
        metric: name of a metric in the entries of `metrics.jsonl`.
        saved: folder of each checkpoint, by its step.
    """
    if (best := find_best(folder, metric, saved)) is None:
        return None
    step, value = best
    content = {"checkpoint": saved[step].name, "step": step, "metric": metric, "value": value}
    replace_file(folder / BEST, (json.dumps(content, indent=2) + "\n").encode())
    return saved[step]
