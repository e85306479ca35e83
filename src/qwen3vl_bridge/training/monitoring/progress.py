"""Progress of a training run for people: a bar on a terminal, plain lines elsewhere.

What lives here: printing entries of the log. What may not: computing them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Self

import torch
from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0
# Metrics that are not computed in every step are repeated until there are new ones.
_SHOWN = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "|g| {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "tflops_per_gpu": "{:.3g} TFLOP/s",
    "mfu": "MFU {:.1%}",
    "memory_gb": "{:.1f} GB",
}
_STAY = ("tokens_per_second", "tflops_per_gpu", "mfu", "memory_gb")


class Progress:
    """Shows steps, on one rank.

    Args:
        total: steps of the whole run.
        done: steps done before this call.
        interval: steps between lines if there is no bar; there is one after ten seconds in any case.
        bar: show a bar, if standard error is a terminal. Lines from elsewhere would break it.
    """

    def __init__(self, total: int, done: int, interval: int, *, bar: bool = True) -> None:
        self._silent = torch.distributed.get_rank() != 0
        self._has_bar = bar and sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            desc="train",
            disable=self._silent or not self._has_bar,
            dynamic_ncols=True,
            bar_format="{desc} {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt}{postfix}",
        )
        self._total, self._first, self._interval = total, done, interval
        self._started = self._last_line = time.monotonic()
        self._latest: dict[str, float] = {}
        self._skipped = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def advance(self, entry: Mapping[str, float]) -> None:
        """Show a finished step, the latest of those since the last call."""
        step, now = int(entry["step"]), time.monotonic()
        self._latest |= {name: entry[name] for name in _STAY if name in entry}
        self._skipped += "skipped" in entry
        text = "  ".join([*self._figures(entry), f"ETA {self._left(step, now)}"])
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)
        due = step % self._interval == 0 or now - self._last_line > _SECONDS_BETWEEN_LINES
        if not self._has_bar and (due or step == self._total or "skipped" in entry):
            self._last_line = now
            self._write(f"step {step}/{self._total}  {text}")

    def note(self, entry: Mapping[str, float]) -> None:
        """Print a permanent line, such as an evaluation."""
        self._write("  ".join(f"{name} {value:.4g}" for name, value in entry.items()))

    def _figures(self, entry: Mapping[str, float]) -> list[str]:
        shown = self._latest | dict(entry)
        figures = [form.format(shown[name]) for name, form in _SHOWN.items() if shown.get(name) is not None]
        if self._skipped:
            this = "this step skipped, " if "skipped" in entry else ""
            figures.append(f"({this}{self._skipped} in all)" if this else f"({self._skipped} skipped)")
        return figures

    def _left(self, step: int, now: float) -> timedelta:
        """h:mm:ss until the end, at the rate so far."""
        each = (now - self._started) / max(step - self._first, 1)
        return timedelta(seconds=round(each * (self._total - step)))

    def _write(self, line: str) -> None:
        if not self._silent:
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()
