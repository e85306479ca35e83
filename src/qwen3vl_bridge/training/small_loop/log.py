"""The log of a run in the small loop: entries in memory, in `metrics.jsonl`, and in TensorBoard and Weights & Biases.

What lives here: keeping entries, going on with the file of a run that is resumed. What may not: what is in an entry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from qwen3vl_bridge.files.atomic import replace_file
from qwen3vl_bridge.training.metrics_file import METRICS, metrics_line, read_metrics
from qwen3vl_bridge.training.monitoring import trackers
from qwen3vl_bridge.training.small_loop.setup import Run

import torch

Entry = dict[str, float]

# What the trackers call figures that Megatron-Bridge's loop logs too.
_NAMES = {
    "loss": "lm loss",
    "lr": "learning-rate",
    "grad_norm": "grad-norm",
    "seconds": "iteration-time",
    "valid_loss": "lm loss validation",
    "load_balancing_loss": "load_balancing_loss",
    "global_load_balancing_loss": "global_load_balancing_loss",
}


class Log:
    """One entry a step, and one an evaluation. Every rank has them; one writes each of the files.

    Attributes:
        entries: since this call.
    """

    def __init__(self, run: Run) -> None:
        self.entries: list[Entry] = []
        self._state, self._settings = run.state, run.cfg.logger
        writes = run.cfg.checkpoint.save and torch.distributed.get_rank() == 0
        self._path = Path(run.cfg.checkpoint.save) / METRICS if writes else None
        if self._path is not None and self._path.exists():
            # Steps after the checkpoint that is resumed from are done again; so is a line that was cut off.
            kept = [entry for entry in read_metrics(self._path.parent) if entry["step"] <= run.progress.step]
            replace_file(self._path, "".join(map(metrics_line, kept)).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        trackers.close(self._state)

    def add(self, entry: Entry) -> None:
        """Keep an entry.

        Args:
            entry: figures by name, "step" among them.
        """
        self.entries.append(entry)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(metrics_line(entry))
        step, settings = int(entry["step"]), self._settings
        due = not settings.skip_train_metrics_log and step % settings.tensorboard_log_interval == 0
        if due or "valid_loss" in entry:
            named = {_NAMES.get(name, trackers.PREFIX + name): value for name, value in entry.items() if name != "step"}
            trackers.write(self._state, named, step)
