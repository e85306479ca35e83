"""What a person sees of a training run: a bar on a terminal, plain lines elsewhere.

What lives here: showing entries of the log. What may not: computing them.
"""

from __future__ import annotations

import sys
import time
from typing import Self

import torch
from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """A progress bar over steps; on rank 0 only.

    Args:
        total: steps of the whole run.
        done: steps done before this call.
    """

    def __init__(self, total: int, done: int) -> None:
        self.silent = torch.distributed.get_rank() != 0
        self.is_terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            desc="train",
            disable=self.silent or not self.is_terminal,
            dynamic_ncols=True,
        )
        self.total, self.started, self.first, self.last_line = total, time.monotonic(), done, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def advance(self, entry: dict[str, float]) -> None:
        """One more step."""
        text = f"loss {entry['loss']:.4f}  lr {entry['lr']:.2e}  |g| {entry['grad_norm']:.2f}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        now, step = time.monotonic(), int(entry["step"])
        if not self.is_terminal and (now - self.last_line > _SECONDS_BETWEEN_LINES or step == self.total):
            self.last_line = now
            left = (now - self.started) / (step - self.first) * (self.total - step)
            self._write(f"step {step}/{self.total}  {text}  {left:.0f} s left")

    def note(self, entry: dict[str, float]) -> None:
        """A line that stays, such as an evaluation."""
        self._write("  ".join(f"{name} {value:.4g}" for name, value in entry.items()))

    def _write(self, line: str) -> None:
        if not self.silent:
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()
