"""Which samples make up which row: an endless sequence of rows, the same on every rank and in every process.

What lives here: epochs, their order, and packing over a window of samples. Plain numbers: a sample is its number in
the file, and all that is asked about it is its length. What may not: reading samples, tensors of a batch.

Each epoch is a new order of the samples, cut into windows. A window's samples are packed into rows together, and the
emptiest row's samples join the next window, so that none is left half empty; the last window of an epoch keeps all of
its rows. So every sample is in exactly one row of every epoch. A `Window` is all that a plan needs to go on from.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.data import get_worker_info

from .packing import best_fit

logger = logging.getLogger(__name__)

Row = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """Where a window begins.

    Attributes:
        epoch: which pass over the samples.
        start: place in the epoch's order of its first new sample.
        carried: samples from the window before.
        first_row: how many rows there are before it, in all epochs.
    """

    epoch: int = 0
    start: int = 0
    carried: Row = ()
    first_row: int = 0


class RowPlan:
    """Rows by their number. Rows far ahead are reached by packing what lies between; going on in order is cheap."""

    def __init__(
        self,
        length: Callable[[int], int],
        num_samples: int,
        *,
        capacity: int,
        pack: bool = True,
        seed: int | None = None,
        window_size: int = 512,
        begin: Window | None = None,
        patches: Callable[[int], int] | None = None,
        most_patches: int | None = None,
    ) -> None:
        """Plan rows of samples.

        Args:
            length: tokens that a sample takes of a row, with what it is padded by; 0 to leave it out.
            num_samples: samples of one epoch.
            capacity: tokens a row holds.
            pack: pack samples into rows; otherwise each is a row.
            seed: of the order; None for the file's own order.
            window_size: samples that are packed together.
            begin: the window to go on from; the first one if None.
            patches: of a sample's pictures; asked after its length, and only where there are `most_patches`.
            most_patches: patches a row holds; any number if None.
        """
        if num_samples < 1 or window_size < 1:
            raise ValueError(f"found {num_samples} samples and windows of {window_size}, expected at least 1 of each")
        self._length, self._num_samples, self._capacity = length, num_samples, capacity
        self._pack, self._seed, self._window_size = pack, seed, window_size
        self._patches, self._most_patches = patches, most_patches
        self._windows = [begin or Window()]
        self._tokens = self._count = 0  # in the epoch's rows so far
        self._order: tuple[int, list[int]] | None = None
        self._packed: tuple[Window, list[Row]] | None = None

    def row(self, number: int) -> Row:
        """Samples of one row.

        Raises:
            IndexError: a row from before the window that the plan went on from.
            ValueError: an epoch without a row.
        """
        window = self.window(number)
        return self._rows(window)[number - window.first_row]

    def window(self, number: int) -> Window:
        """The window that a row is of."""
        if number < self._windows[0].first_row:
            raise IndexError(f"row {number} lies before row {self._windows[0].first_row}, where this plan begins")
        while self._windows[-1].first_row <= number:
            self._extend()
        return self._windows[bisect_right(self._windows, number, key=lambda window: window.first_row) - 1]

    def end_of_epoch(self) -> int:
        """Number of the first row after the epoch that the plan begins in."""
        epoch = self._windows[0].epoch
        while self._windows[-1].epoch == epoch:
            self._extend()
        return next(window.first_row for window in self._windows if window.epoch > epoch)

    def _extend(self) -> None:
        """Append the window after the last known one."""
        window = self._windows[-1]
        rows, carried = self._pack_window(window)
        self._tokens += sum(self._length(sample) for row in rows for sample in row)
        self._count += sum(len(row) for row in rows)
        start, first_row = window.start + self._window_size, window.first_row + len(rows)
        if start < self._num_samples:
            self._windows.append(Window(window.epoch, start, carried, first_row))
            return
        epochs = [w.first_row for w in self._windows if w.epoch == window.epoch and w.start == 0]
        if epochs and epochs[0] == first_row:
            raise ValueError(f"epoch {window.epoch}: none of {self._num_samples} samples is in a row")
        self._windows.append(Window(window.epoch + 1, 0, (), first_row))
        self._report(window.epoch, first_row - epochs[0] if epochs else 0)

    def _report(self, epoch: int, rows: int) -> None:
        """Say how full an epoch's rows are, where the plan has seen all of it. One of several workers says it."""
        worker = get_worker_info()
        if rows and (worker is None or worker.id == 0):
            share = self._tokens / (rows * self._capacity)
            level = logging.INFO if epoch == 0 and self._seed is not None else logging.DEBUG
            text = "epoch %d: %d samples in %d rows of %d tokens, %.1f %% full"
            logger.log(level, text, epoch, self._count, rows, self._capacity, 100 * share)
        self._tokens = self._count = 0

    def _rows(self, window: Window) -> list[Row]:
        if self._packed is None or self._packed[0] != window:
            self._pack_window(window)
        assert self._packed is not None
        return self._packed[1]

    def _pack_window(self, window: Window) -> tuple[list[Row], Row]:
        """The window's rows, and the samples it leaves to the next one."""
        end = window.start + self._window_size
        samples = [*window.carried, *self._epoch_order(window.epoch)[window.start : end]]
        lengths = {sample: length for sample in samples if (length := self._length(sample))}
        kept, carried = list(lengths), ()
        if not self._pack:
            rows = [(sample,) for sample in kept]
        else:
            patches = None
            if self._patches is not None and self._most_patches is not None:
                patches = [self._patches(sample) for sample in kept]
            packed = best_fit([lengths[sample] for sample in kept], self._capacity, patches, self._most_patches)
            rows = [tuple(kept[place] for place in row) for row in packed]
            if end < self._num_samples and len(rows) > 1:
                emptiest = min(range(len(rows)), key=lambda row: (sum(lengths[s] for s in rows[row]), -row))
                carried = rows.pop(emptiest)
        self._packed = (window, rows)
        return rows, carried

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(self._num_samples))
        if self._order is None or self._order[0] != epoch:
            # One generator an epoch, so that any epoch can be gone on from without those before it.
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(self._num_samples, generator=generator).tolist())
        return self._order[1]
