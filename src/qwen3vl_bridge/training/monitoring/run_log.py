"""The log of a run: one entry per step and evaluation, in `metrics.jsonl` next to its checkpoints, and printed.

What lives here: the callback that creates entries and writes the file, also for a resumed run. What may not: the format
of an entry (`training/metrics_file.py`), metrics of other callbacks, trackers (`trackers.py`).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from qwen3vl_bridge.files.atomic import replace_file
from qwen3vl_bridge.parallel.collectives import gather_objects
from qwen3vl_bridge.training.metrics_file import METRICS, metrics_line, read_metrics
from qwen3vl_bridge.training.monitoring.progress import Progress
from qwen3vl_bridge.training.monitoring.trackers import MEASURED, step_of
from qwen3vl_bridge.training.optimizer.before_step import STEP_LOSS

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

logger = logging.getLogger(__name__)

Entry = dict[str, float]

# Key of the latest entry, on every rank, in `context.user_state`.
ENTRY = "log_entry"


class RunLog(Callback):
    """Comes last among the callbacks of a run: an entry includes their metrics of the same event.

    Loss and tokens are those that all ranks have summed before the optimizer's step, so every rank has every entry. One
    rank writes the file, and prints.
    """

    def on_train_start(self, context: CallbackContext) -> None:
        """Continue the file of a resumed run: entries of steps after its checkpoint are removed, because they are
        repeated.
        """
        cfg, step = context.state.cfg, context.state.train_state.step
        self._shown = Progress(cfg.train.train_iters, step, cfg.logger.log_interval, bar=not torch.cuda.is_available())
        self._validated: int | None = None
        if step >= cfg.train.train_iters and torch.distributed.get_rank() == 0:
            logger.warning(
                "the run is complete: %s is at step %d and train.train_iters is %d; raise train.train_iters, or "
                "choose another folder",
                *(cfg.checkpoint.load, step, cfg.train.train_iters),
            )
        self._path: Path | None = None
        here = cfg.checkpoint.save and "://" not in str(cfg.checkpoint.save)  # remote paths are not folders
        if here and torch.distributed.get_rank() == 0:
            self._path = Path(cfg.checkpoint.save) / METRICS
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():  # a truncated line is removed, too
                kept = [entry for entry in read_metrics(self._path.parent) if entry["step"] <= step]
                replace_file(self._path, "".join(map(metrics_line, kept)).encode())

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Note the step's start time and learning rate."""
        self._lr = get_canonical_lr_for_logging(context.optimizer.param_groups)
        self._started = time.perf_counter()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Add the entry of a step."""
        entry: Entry = {"step": step_of(context)}
        loss, tokens = context.user_state[STEP_LOSS]
        if tokens:
            entry["loss"] = loss / tokens
        elif "lm loss" in context.loss_dict:  # of another package's forward step
            entry["loss"] = float(context.loss_dict["lm loss"])
        entry["lr"] = self._lr
        if context.grad_norm is not None:
            entry["grad_norm"] = float(context.grad_norm)
        entry |= {"trained_tokens": int(tokens), "seconds": time.perf_counter() - self._started}
        if context.skipped_iter:
            entry["skipped"] = 1
        self._shown.advance(self._add(context, entry))

    def on_eval_end(self, context: CallbackContext) -> None:
        """Add the entry of an evaluation, unless there is one of the same step and rows."""
        heard = gather_objects({name: float(value) for name, value in (context.total_loss_dict or {}).items()})
        losses = next((found for found in heard if "lm loss" in found), {})
        step = context.state.train_state.step
        if self._validated != step and losses:
            self._validated = step
            self._shown.note(self._add(context, {"step": step, "valid_loss": losses["lm loss"]}))

    def on_train_end(self, context: CallbackContext) -> None:
        """Finish the console output; a final validation that repeats the previous one is not logged."""
        self._shown.close()
        state = context.state
        if self._validated == state.train_state.step and getattr(state.cfg.dataset, "rows_of_evaluation", None):
            state.train_state.do_valid = False

    def _add(self, context: CallbackContext, entry: Entry) -> Entry:
        entry |= context.user_state.pop(MEASURED, {})
        context.user_state[ENTRY] = entry
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(metrics_line(entry))
        return entry
