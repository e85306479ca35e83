"""Shows the progress of a conversion."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from threading import Lock

from qwen3vl_bridge.terminal import show

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Bytes done of a total, on standard error. Thread-safe."""

    def __init__(self, label: str, total: int, *, shown: bool = True) -> None:
        self._label, self._total, self._done = label, total, 0
        self._shown, self._lock = shown, Lock()
        self._begun = self._said = time.monotonic()
        self._bar = _bar(label, total) if shown and sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown and kind is None:
            self._line()

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self._begun

    def counted(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same blocks, counted as they pass."""
        for block in blocks:
            count = len(block)
            yield block
            self.advance(count)

    def advance(self, count: int) -> None:
        """Add a number of finished bytes."""
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.update(count)
            elif self._shown and time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
                self._said = time.monotonic()
                self._line()

    def _line(self) -> None:
        rate = self._done / max(self.seconds, 1e-9)
        left = (self._total - self._done) / max(rate, 1.0)
        share = 100 * self._done / self._total if self._total else 100
        done, total = self._done / 1e9, self._total / 1e9
        text = f"{self._label}: {share:3.0f} %, {done:.2f} of {total:.2f} GB, {rate / 1e9:.2f} GB/s, {left:.0f} s left"
        show(text, error=True)


def _bar(label: str, total: int):
    from tqdm import tqdm

    return tqdm(total=total, desc=label, unit="B", unit_scale=True, file=sys.stderr)
