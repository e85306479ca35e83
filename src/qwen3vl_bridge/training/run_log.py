"""Log steps and evaluations of a run: to `metrics.jsonl` next to its checkpoints, to the terminal, and to trackers.

Callbacks pass their metrics to `publish_metrics`; `RunLog` is the last callback. Megatron-Bridge creates the writers
for TensorBoard and Weights & Biases on the last rank.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.atomic import replace_file
from qwen3vl_bridge.core.collectives import gather_objects, is_rank_zero, raise_on_all_ranks
from qwen3vl_bridge.core.files import parse_record
from qwen3vl_bridge.data.loading import Epoch
from qwen3vl_bridge.training.objective_settings import objective_of
from qwen3vl_bridge.training.run_lock import lock_folder

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

logger = logging.getLogger(__name__)

Entry = dict[str, float]

METRICS = "metrics.jsonl"
# Keys of `context.user_state`, on every rank. MEASURED: metrics of the current event, until they are logged. ENTRY: the
# latest log entry. STEP_LOSS: (sum of losses, number of tokens or pairs) of the step over all ranks. COMPONENT_NORMS:
# gradient norms by component.
MEASURED, ENTRY, STEP_LOSS, COMPONENT_NORMS = "measured", "log_entry", "step_loss", "component_norms"
_LOCK = "run_lock"
# Prefix of this package's metrics in TensorBoard and Weights & Biases.
PREFIX = "qwen3vl/"


class RunLog(Callback):
    """Callback that writes one log entry per step and per evaluation.

    It must be the last callback, so that entries include all metrics. The first rank writes and prints the entries.
    """

    finished: int | None = None  # the latest finished step; None until training begins

    def on_train_start(self, context: CallbackContext) -> None:
        """Open the log. If the run resumes from a checkpoint, remove the entries of later steps, which it repeats."""
        cfg, step = context.state.cfg, context.state.train_state.step
        self._shown = StepProgress(cfg.train.train_iters, step, cfg.logger.log_interval)
        self._validated: int | None = None
        self.finished = step
        self._path: Path | None = None
        here = cfg.checkpoint.save and "://" not in str(cfg.checkpoint.save)  # remote paths are not folders
        with raise_on_all_ranks():
            if here and is_rank_zero():
                self._path = Path(cfg.checkpoint.save) / METRICS
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # The checkpoint manager of Megatron-Bridge's own ConfigContainer does not lock the folder. `user_state`
                # releases the lock when the loop returns; this callback may exist for longer.
                context.user_state[_LOCK] = lock_folder(self._path.parent)
        if self._path is not None and self._path.exists():  # removes a truncated line too
            kept = [entry for entry in read_metrics(self._path.parent) if entry["step"] <= step]
            replace_file(self._path, "".join(map(metrics_line, kept)).encode())
        if not is_rank_zero():
            return
        if (epoch := getattr(cfg.dataset, "epoch", None)) is not None:
            self._show_epoch(epoch, cfg)
        if step:
            self._shown.write(f"continuing {cfg.checkpoint.load} from step {step} of {cfg.train.train_iters}")
        rows, tokens = cfg.train.global_batch_size, cfg.model.seq_length
        if not torch.cuda.is_available() and rows * tokens > _MANY_TOKENS:
            logger.warning(
                "a step of %d rows of %s tokens takes long on a CPU; to try out a run, set train.global_batch_size=1 "
                "model.seq_length=512 dataset.seq_length=512",
                *(rows, f"{tokens:,}"),
            )
        self._shown.watch(context.model[0])

    def _show_epoch(self, epoch: Epoch, cfg: ConfigContainer) -> None:
        """Print the length of an epoch and the number of epochs. Warn if a step is longer than an epoch."""
        steps, batch, about = cfg.train.train_iters, cfg.train.global_batch_size, "" if epoch.is_counted else "about "
        per_epoch = epoch.rows / batch
        self._shown.write(
            f"epoch: samples {epoch.samples:,}  rows {about}{epoch.rows:,.0f} of {cfg.dataset.seq_length:,} tokens  "
            f"tokens {about}{epoch.tokens:,.0f}  steps {about}{per_epoch:,.4g} of {batch:,} rows;  "
            f"run: steps {steps:,}  epochs {about}{steps / max(per_epoch, 1e-9):,.4g}"
        )
        if per_epoch < 1:
            logger.warning(
                "an epoch is shorter than a step, so each step trains on every sample about %.3g times: lower "
                "train.global_batch_size (%d rows) or dataset.seq_length, and set train.num_epochs",
                *(1 / max(per_epoch, 1e-9), batch),
            )

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Record the start time and learning rate of the step."""
        self._lr = get_canonical_lr_for_logging(context.optimizer.param_groups)
        self._started = time.perf_counter()
        self._shown.begin(context.state.train_state.step + 1, get_num_microbatches())

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Write the log entry of the step, and print its progress."""
        self.finished = finished_step(context)
        entry: Entry = {"step": self.finished}
        loss, tokens = context.user_state[STEP_LOSS]
        if tokens:
            entry["loss"] = loss / tokens
        elif "lm loss" in context.loss_dict:  # from another package's forward step
            entry["loss"] = float(context.loss_dict["lm loss"])
        entry["lr"] = self._lr
        norms = context.user_state[COMPONENT_NORMS].values()  # a skipped step has norms too
        entry["grad_norm"] = math.hypot(*norms) if context.grad_norm is None else float(context.grad_norm)
        objective = objective_of(context.state.cfg)
        unit = "tokens" if objective is None else objective.unit
        entry |= {f"trained_{unit}": int(tokens), "seconds": time.perf_counter() - self._started}
        if context.skipped_iter:
            entry["skipped"] = 1
        self._shown.advance(self._add(context, entry))

    def on_eval_end(self, context: CallbackContext) -> None:
        """Write the log entry of an evaluation, unless the step already has one."""
        losses_of_ranks = gather_objects(
            {name: float(value) for name, value in (context.total_loss_dict or {}).items()}
        )
        losses = next((losses for losses in losses_of_ranks if "lm loss" in losses), {})
        step = context.state.train_state.step
        if self._validated != step and losses:
            self._validated = step
            objective = objective_of(context.state.cfg)
            names = objective.metrics if objective else ()
            of_objective = {f"valid_{name}": losses[name] for name in names if name in losses}
            entry = self._add(context, {"step": step, "valid_loss": losses["lm loss"]} | of_objective)
            self._shown.write("  ".join(f"{name} {value:.4g}" for name, value in entry.items()))

    def on_train_end(self, context: CallbackContext) -> None:
        """Skip the final validation if the previous validation was at the same step."""
        self._shown.end()
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


def publish_metrics(context: CallbackContext, metrics: Mapping[str, float]) -> None:
    """Add metrics to the log entry of the current event, and send them to TensorBoard and Weights & Biases.

    Any rank may call this. Only ranks that have one of these loggers send the metrics to it.
    """
    context.user_state.setdefault(MEASURED, {}).update(metrics)
    tracked, step = {PREFIX + name: value for name, value in metrics.items()}, finished_step(context)
    if (board := context.state.tensorboard_logger) is not None:
        for name, value in tracked.items():
            board.add_scalar(name, value, step)
    if (wandb := context.state.wandb_logger) is not None:
        wandb.log(tracked, step)


def finished_step(context: CallbackContext) -> int:
    """Return the number of the latest finished step.

    The result includes a step whose `on_train_step_end` callbacks are running. Megatron-Bridge's own counter includes
    it only afterwards.
    """
    return context.state.train_state.step + (context.loss_dict is not None)


def metrics_line(entry: Mapping[str, Any]) -> str:
    """Return a log entry as a line of JSON.

    Values that are not finite become null, because JSON cannot represent them.
    """
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in entry.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the log entries in a run's folder; an empty list if there is no log. Truncated lines are skipped."""
    path, entries = folder / METRICS, []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(parse_record(line))
        except ValueError:
            continue
    return entries


_SECONDS_BETWEEN_LINES = 10.0
# Steps with more tokens than this cause a warning on a CPU: with 2B parameters such a step takes hours.
_MANY_TOKENS = 64 * 1024
_SHOWN = {
    "loss": "loss {:.4f}",
    "rewards/margins": "margin {:.4g}",
    "rewards/accuracies": "accuracy {:.3f}",
    "lr": "lr {:.2e}",
    "grad_norm": "|g| {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "tflops_per_gpu": "{:.3g} TFLOP/s",
    "mfu": "MFU {:.1%}",
    "memory_gb": "{:.1f} GB",
}
# Metrics that are not computed in every step; the latest values are shown.
_REPEATED = ("tokens_per_second", "tflops_per_gpu", "mfu", "memory_gb")


class StepProgress:
    """Prints progress lines to standard error, on the first rank.

    A line is printed after a step if the number of the step is a multiple of `interval`, or if the last line is older
    than ten seconds. During a long step, the number of the current microbatch is printed; during a long evaluation, the
    number of forward passes.
    """

    def __init__(self, total: int, done: int, interval: int) -> None:
        self._silent = torch.distributed.get_rank() != 0
        self._total, self._first, self._interval = total, done, interval
        self._started = self._last_line = self._begun = time.monotonic()
        self._latest: dict[str, float] = {}
        self._skipped = 0
        self._step = self._microbatch = self._microbatches = self._evaluated = 0
        self._hook = None

    def watch(self, model: torch.nn.Module) -> None:
        """Register a hook that counts the forward passes of a model, until `end` removes it."""
        self._hook = model.register_forward_pre_hook(self._count)

    def _count(self, model: torch.nn.Module, _: Any) -> None:
        self._microbatch += model.training
        self._evaluated += not model.training
        now = time.monotonic()
        if now - self._begun >= _SECONDS_BETWEEN_LINES:
            self._begun = now
            step = f"step {self._step}: microbatch {self._microbatch} of {self._microbatches}"
            self.write(step if model.training else f"evaluation: forward pass {self._evaluated:,}")

    def begin(self, step: int, microbatches: int) -> None:
        """Record that the step with the number `step` begins, and that it has `microbatches` microbatches."""
        self._begun, self._step, self._microbatches = time.monotonic(), step, microbatches
        self._microbatch = 0

    def end(self) -> None:
        """Remove the hook that `watch` has registered."""
        if self._hook is not None:
            self._hook.remove()

    def advance(self, entry: Mapping[str, float]) -> None:
        """Record a finished step, and print a line about it if one is due."""
        step, now = int(entry["step"]), time.monotonic()
        self._microbatch = self._evaluated = 0
        self._begun = now
        self._latest |= {name: entry[name] for name in _REPEATED if name in entry}
        self._skipped += "skipped" in entry
        due = step % self._interval == 0 or now - self._last_line > _SECONDS_BETWEEN_LINES
        if not (due or step == self._total or "skipped" in entry):
            return
        self._last_line, shown = now, self._latest | dict(entry)
        parts = [form.format(shown[name]) for name, form in _SHOWN.items() if shown.get(name) is not None]
        if self._skipped:
            parts.append(
                f"(this step skipped, {self._skipped} in all)" if "skipped" in entry else f"({self._skipped} skipped)"
            )
        left = (now - self._started) / max(step - self._first, 1) * (self._total - step)
        self.write("  ".join([f"step {step}/{self._total}", *parts, f"ETA {timedelta(seconds=round(left))}"]))

    def write(self, line: str) -> None:
        """Print a line to standard error, on the first rank only."""
        if not self._silent:
            print(line, file=sys.stderr, flush=True)
