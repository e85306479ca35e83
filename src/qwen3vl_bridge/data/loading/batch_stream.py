"""Microbatches for a custom training loop: an endless stream that can be resumed, and a single pass.

All ranks count the same rows: of each group of dp_size * micro_batch_size rows, a rank takes micro_batch_size. So a
position is one number for all ranks, and a run may resume with another number of ranks; for a stream, with any that
reads it in as many parts (`streamed_rows.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.loading.row_dataset import Row, RowDataset, without_loss
from qwen3vl_bridge.data.loading.streamed_rows import StreamedRows
from qwen3vl_bridge.data.loading.worker_processes import ignoring
from qwen3vl_bridge.data.packing.row_plan import Window
from qwen3vl_bridge.data.sources.fingerprints import check_assignment, check_position

import torch
from torch.utils.data import DataLoader


class BatchStream(Iterator[PackedBatch]):
    """This rank's microbatches, epoch after epoch."""

    def __init__(
        self,
        rows: RowDataset | StreamedRows,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch_size: int = 1,
        num_workers: int = 0,
        ignored_signal: int | None = None,
    ) -> None:
        """Start at the first row.

        Args:
            rows: the split's, planned from the beginning.
            dp_rank: this data-parallel rank.
            dp_size: number of data-parallel ranks.
            micro_batch_size: rows of a microbatch.
            num_workers: processes that read and encode ahead; 0 for none.
            ignored_signal: number of a signal that these processes ignore.
        """
        _check_share(dp_rank, dp_size, micro_batch_size)
        self._rows, self._num_workers, self._ignored_signal = rows, num_workers, ignored_signal
        self._first, self._micro_batch_size = dp_rank * micro_batch_size, micro_batch_size
        self._group = dp_size * micro_batch_size
        self._next_row, self._window = 0, Window()
        # The loader, if there is one. Referenced from outside the stream, so that it is whole when the stream has gone:
        # Python's collector destroys the parts of a reference cycle in an order that leaves torch's workers waiting.
        self._loaders: list[Iterator[tuple[PackedBatch, Window]]] = []
        # Not when the process exits, which `worker_processes` does not let wait for them.
        weakref.finalize(self, self._loaders.clear).atexit = False

    def __next__(self) -> PackedBatch:
        """The next microbatch.

        Raises:
            DataError: a sample that cannot be trained on.
        """
        if not self._loaders:
            self._loaders.append(self._loader())
        try:
            batch, self._window = next(self._loaders[0])
        except DataError as error:
            self._loaders.clear()  # already advanced; the next call returns the same row
            raise error.without_traceback() from None
        self._next_row += self._group
        return batch

    def _loader(self) -> Iterator[tuple[PackedBatch, Window]]:
        rows, start = self._micro_batch_size, count(self._next_row + self._first, self._group)
        return iter(
            DataLoader(
                self._rows,
                # Without `self`, which would then never be collected.
                batch_sampler=([first + place for place in range(rows)] for first in start),
                collate_fn=_Collate(self._rows),
                num_workers=self._num_workers,
                worker_init_fn=ignoring(self._ignored_signal),
                # Otherwise it draws from the global generator here, and a resumed run differs from an uninterrupted
                # one.
                generator=torch.Generator(),
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream: plain numbers, equal on every rank except for the window."""
        return {
            "row": self._next_row,
            "window": asdict(self._window),
            "data": self._rows.fingerprint(),
            "dealt": self._rows.assignment(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from another stream's position.

        Args:
            state: its `state_dict`.

        Raises:
            ValueError: it is of other data or other rows, or within rows that were assigned to another number of ranks.
        """
        check_position(self._rows.fingerprint(), state["data"])
        check_assignment(state["row"], tuple(state["dealt"]), self._rows.assignment())
        # Lists, if it went through JSON.
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in state["window"].items()
        }
        window = Window(**known)
        self._next_row, self._window = state["row"], window
        self._rows = self._rows.begun_at(window)
        self._loaders.clear()


class _Collate:
    """Collates, and keeps the window for the stream's position. A class, because it is sent to workers."""

    def __init__(self, rows: RowDataset | StreamedRows) -> None:
        self._rows = rows

    def __call__(self, rows: list[Row]) -> tuple[PackedBatch, Window]:
        return self._rows.collate_fn(rows), rows[0].window


def one_pass(
    rows: RowDataset, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1
) -> Iterator[PackedBatch]:
    """Every row of the first epoch once, the same number of microbatches on every rank.

    If the number of rows is not a multiple of what ranks read in turn, the last row is repeated without loss.

    Args:
        rows: the split's rows.
        dp_rank: this data-parallel rank.
        dp_size: number of data-parallel ranks.
        micro_batch_size: rows of a microbatch.

    Yields:
        This rank's microbatches.
    """
    _check_share(dp_rank, dp_size, micro_batch_size)
    total = rows.plan.end_of_epoch()
    for first in range(0, total, dp_size * micro_batch_size):
        start = first + dp_rank * micro_batch_size
        numbers = range(start, start + micro_batch_size)
        batch = rows.collate_fn([rows[min(number, total - 1)] for number in numbers])
        yield replace(batch, loss_mask=without_loss(batch, [number >= total for number in numbers]))


def _check_share(dp_rank: int, dp_size: int, micro_batch_size: int) -> None:
    if not 0 <= dp_rank < dp_size or micro_batch_size < 1:
        raise ValueError(
            f"found data-parallel rank {dp_rank} of {dp_size} and {micro_batch_size} rows a microbatch, "
            "expected a rank inside its group and at least one row"
        )
