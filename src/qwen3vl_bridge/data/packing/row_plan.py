"""The endless sequence of rows of a run, window by window: equal on every rank and in every process.

Each epoch is an order of the samples, cut into windows. A window's samples are packed into rows together, and the
samples of the emptiest row are carried over to the next window; the last window of an epoch keeps all of its rows. So
every sample is in exactly one row of every epoch. A `Window` is all that a plan needs to resume.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.packing.best_fit import best_fit
from qwen3vl_bridge.data.packing.sample_order import Order
from qwen3vl_bridge.data.packing.sample_sizes import Size
from qwen3vl_bridge.data.packing.set_counts import SetCounts, add_counts, count_sets

from torch.utils.data import get_worker_info

logger = logging.getLogger(__name__)

Row = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """The start of a window.

    Attributes:
        epoch: the pass over the samples.
        start: position in the epoch's order of its first new sample.
        carried: samples from the previous window.
        first_row: number of rows before it, over all epochs.
        dropped: per data set, the number of samples before it that were dropped (bad or too long), over all epochs.
    """

    epoch: int = 0
    start: int = 0
    carried: Row = ()
    first_row: int = 0
    dropped: SetCounts = ()


class _PackedWindow(NamedTuple):
    """A window's rows, the samples carried over to the next one, whether the epoch ends with it, and its dropped
    samples.
    """

    window: Window
    rows: list[Row]
    carried: Row
    is_last: bool
    dropped: SetCounts


class RowPlan:
    """Rows by their number. Random access packs all rows up to the requested one; sequential access is cheap."""

    def __init__(
        self,
        size: Callable[[int], Size],
        order: Order,
        *,
        capacity: int,
        pack: bool = True,
        window_size: int = 512,
        begin: Window | None = None,
        most_patches: int | None = None,
        report: bool = True,
        measure: Callable[[Sequence[int]], None] | None = None,
        set_of: Callable[[int], int] | None = None,
    ) -> None:
        """Plan rows of samples.

        Args:
            size: space of a sample in a row, with its padding; no tokens to drop it.
            order: of the samples of each epoch.
            capacity: maximum tokens per row.
            pack: pack samples into rows; otherwise each is a row.
            window_size: number of samples packed together.
            begin: the window to resume from; the first one if None.
            most_patches: maximum patches per row; None without a limit.
            report: log how full the first epoch's rows were.
            measure: called with the samples whose sizes are needed next.
            set_of: index of a sample's data set, for counts of dropped samples; None if there is only one.
        """
        if window_size < 1:
            raise ValueError(f"found windows of {window_size} samples, expected at least 1")
        self._size, self._order, self._capacity, self._most_patches = size, order, capacity, most_patches
        self._pack, self._window_size, self._reports, self._measure = pack, window_size, report, measure
        self._set_of = set_of
        self._windows = [begin or Window()]
        self._tokens = self._count = 0  # in the epoch's rows so far
        self._packed: _PackedWindow | None = None

    def row(self, number: int) -> Row:
        """Samples of one row.

        Raises:
            IndexError: a row before the window from which the plan was resumed.
            DataError: an epoch without a row.
        """
        window = self.window(number)
        return self._pack_window(window).rows[number - window.first_row]

    def window(self, number: int) -> Window:
        """The window that contains a row."""
        if number < self._windows[0].first_row:
            raise IndexError(f"row {number} is before row {self._windows[0].first_row}, where this plan begins")
        while self._windows[-1].first_row <= number:
            self._extend()
        return self._windows[bisect_right(self._windows, number, key=lambda window: window.first_row) - 1]

    def dropped(self, number: int) -> SetCounts:
        """Per data set, the number of samples dropped in this row's window or before."""
        return self._pack_window(self.window(number)).dropped

    def end_of_epoch(self) -> int:
        """Number of the first row after the epoch that the plan begins in."""
        epoch = self._windows[0].epoch
        while self._windows[-1].epoch == epoch:
            self._extend()
        return next(window.first_row for window in self._windows if window.epoch > epoch)

    def _extend(self) -> None:
        """Append the window after the last known one."""
        window = self._windows[-1]
        packed = self._pack_window(window)
        self._tokens += sum(self._size(sample).tokens for row in packed.rows for sample in row)
        self._count += sum(len(row) for row in packed.rows)
        start, first_row = window.start + self._window_size, window.first_row + len(packed.rows)
        if not packed.is_last:
            self._windows.append(Window(window.epoch, start, packed.carried, first_row, packed.dropped))
            return
        epochs = [w.first_row for w in self._windows if w.epoch == window.epoch and w.start == 0]
        if epochs and epochs[0] == first_row:
            raise DataError(
                f"epoch {window.epoch}",
                "none of its samples is in a row: all are bad or too long, and were dropped. The log names the first "
                "of them; `qwen3vl data inspect` shows why, `on_bad=error` stops at the first",
            )
        self._windows.append(Window(window.epoch + 1, 0, (), first_row, packed.dropped))
        self._report(window.epoch, first_row - epochs[0] if epochs else 0)

    def _report(self, epoch: int, rows: int) -> None:
        """Log how full an epoch's rows are, if the plan has seen all of it. Only one of several workers logs it."""
        worker = get_worker_info()
        if rows and (worker is None or worker.id == 0):
            share = self._tokens / (rows * self._capacity)
            level = logging.INFO if epoch == 0 and self._reports else logging.DEBUG
            text = "epoch %d: %d samples in %d rows of %d tokens, %.1f %% full"
            logger.log(level, text, epoch, self._count, rows, self._capacity, 100 * share)
        self._tokens = self._count = 0

    def _pack_window(self, window: Window) -> _PackedWindow:
        if self._packed is not None and self._packed.window == window:
            return self._packed
        new = self._order.numbers(window.epoch, window.start, self._window_size)
        is_last = len(new) < self._window_size
        if self._measure is not None:
            self._measure(new)
        sizes = {sample: self._size(sample) for sample in (*window.carried, *new)}
        # Not the keys: a mixture may have a sample several times in a window.
        kept, carried = [sample for sample in (*window.carried, *new) if sizes[sample].tokens], ()
        if not self._pack:
            rows = [(sample,) for sample in kept]
        else:
            lengths, patches = [sizes[sample].tokens for sample in kept], [sizes[sample].patches for sample in kept]
            packed = best_fit(lengths, self._capacity, patches, self._most_patches)
            rows = [tuple(kept[place] for place in row) for row in packed]
            if not is_last and len(rows) > 1:
                emptiest = min(range(len(rows)), key=lambda row: (sum(sizes[s].tokens for s in rows[row]), -row))
                carried = rows.pop(emptiest)
        out = count_sets(self._set_of(sample) if self._set_of else 0 for sample in new if not sizes[sample].tokens)
        self._packed = _PackedWindow(window, rows, carried, is_last, add_counts(window.dropped, out))
        return self._packed
