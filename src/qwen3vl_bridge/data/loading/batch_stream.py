"""Microbatches for a training loop: a resumable stream, a single pass, and the processes that read ahead.

All ranks count the same rows: of each group of dp_size * micro_batch_size rows, a rank takes micro_batch_size. So a
position is one number for all ranks, and a run may resume with another number of ranks; for a stream, with any that
reads it in as many parts (`StreamedRows`).
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import batched, count
from multiprocessing.util import Finalize
from typing import Any

from qwen3vl_bridge.batch import TokenBatch
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.loading.row_dataset import RowDataset, without_loss
from qwen3vl_bridge.data.packing.row_plan import Window

import torch
from torch.utils.data import DataLoader


class BatchStream(Iterator[TokenBatch]):
    """This rank's microbatches, epoch after epoch."""

    def __init__(
        self,
        rows: RowDataset,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch_size: int = 1,
        num_workers: int = 0,
        ignored_signal: int | None = None,
    ) -> None:
        """Start at the first row of a split's rows, planned from the beginning.

        `num_workers` processes read and encode ahead, and ignore the signal of the number `ignored_signal`.
        """
        check_share(dp_rank, dp_size, micro_batch_size)
        self._rows, self._num_workers, self._ignored_signal = rows, num_workers, ignored_signal
        self._first, self._micro_batch_size = dp_rank * micro_batch_size, micro_batch_size
        self._group = dp_size * micro_batch_size
        self._next_row, self._window = 0, Window()
        # The loader, if there is one. Referenced from outside the stream, so that it is whole when the stream has gone:
        # Python's collector destroys the parts of a reference cycle in an order that leaves torch's workers waiting.
        self._loaders: list[Iterator[tuple[TokenBatch, Window]]] = []
        # Not when the process exits, which `_end_workers` does not let wait for them.
        weakref.finalize(self, self._loaders.clear).atexit = False

    def __next__(self) -> TokenBatch:
        """The next microbatch; a `DataError` at a sample that cannot be trained on."""
        if not self._loaders:
            self._loaders.append(self._loader())
        try:
            batch, self._window = next(self._loaders[0])
        except DataError as error:
            self._loaders.clear()  # already advanced; the next call returns the same row
            raise error.without_traceback() from None
        self._next_row += self._group
        return batch

    def _loader(self) -> Iterator[tuple[TokenBatch, Window]]:
        # Nothing that the loader holds refers to `self`, which would then never be collected.
        dataset, rows = self._rows, self._micro_batch_size
        start = count(self._next_row + self._first, self._group)
        loader = DataLoader(
            dataset,
            batch_sampler=([first + place for place in range(rows)] for first in start),
            collate_fn=lambda read: (dataset.collate_fn(read), read[0].window),
            num_workers=self._num_workers,
            worker_init_fn=ignoring(self._ignored_signal),
            # Not the global generator: a resumed run would differ from an uninterrupted one.
            generator=torch.Generator(),
        )
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream: plain numbers, equal on every rank except for the window."""
        return {
            "row": self._next_row,
            "window": asdict(self._window),
            "data": self._rows.fingerprint(),
            "dealt": self._rows.assignment(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from another stream's `state_dict`; a `ValueError` if it is of other data or rows, or within rows
        that were assigned to another number of ranks.
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


def one_pass(
    rows: RowDataset, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1
) -> Iterator[TokenBatch]:
    """Every row of the first epoch once, the same number of microbatches on every rank (see `share_of_pass`)."""
    check_share(dp_rank, dp_size, micro_batch_size)
    numbers = iter(range(rows.plan.end_of_epoch()))
    return share_of_pass(
        numbers, lambda some: rows.collate_fn([rows[one] for one in some]), dp_rank, dp_size, micro_batch_size
    )


def share_of_pass[Row](
    rows: Iterator[Row], lay_out: Callable[[list[Row]], TokenBatch], dp_rank: int, dp_size: int, micro_batch_size: int
) -> Iterator[TokenBatch]:
    """A rank's microbatches of rows that all ranks read in turn; a `DataError` if there are none.

    If the number of rows is not a multiple of what ranks read in turn, the last row is repeated without loss.
    """
    numbers = range(dp_rank * micro_batch_size, (dp_rank + 1) * micro_batch_size)
    groups = batched(rows, dp_size * micro_batch_size)
    for turn in count():
        try:
            group = next(groups, ())
        except DataError as error:
            raise error.without_traceback() from None
        if not group:
            if not turn:
                raise DataError("found no samples, expected at least one")
            return
        batch = lay_out([group[min(number, len(group) - 1)] for number in numbers])
        yield replace(batch, loss_mask=without_loss(batch, [number >= len(group) for number in numbers]))


def check_position(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a position in other data, by the fingerprints of the present data and of the position (ValueError)."""
    now, then = found.get("parts"), expected.get("parts")
    if then is not None and now is not None and now != then:
        raise ValueError(
            f"the position is in a stream that was read in {then} parts, found {now}, expected {then}: as many "
            "data-parallel ranks x data-loading processes as before, or others of which it is a multiple and "
            f"dataset.stream_parts={then}"
        )
    if names := [name for name in {**expected, **found} if found.get(name) != expected.get(name)]:
        differ = "; ".join(f"{name} {found.get(name)}, expected {expected.get(name)}" for name in names)
        raise ValueError(f"the checkpoint's position belongs to other data: found {differ}")


def check_assignment(row: int, before: tuple[int, int], now: tuple[int, int]) -> None:
    """Refuse a position (a row) within rows that were assigned to ranks differently (ValueError).

    `before` and `now`: how many rows are assigned together, and to how many ranks.
    """
    if before != now and any(row % over for over, _ in (before, now)):
        raise ValueError(
            f"the position, row {row}, is among {before[0]} rows that were assigned to {before[1]} ranks, "
            f"and now {now[0]} rows are to {now[1]}: expected the same, or a checkpoint between them"
        )


def check_share(dp_rank: int, dp_size: int, micro_batch_size: int = 1) -> None:
    """Refuse a data-parallel rank outside its group, and empty microbatches."""
    if not 0 <= dp_rank < dp_size or micro_batch_size < 1:
        raise ValueError(
            f"found data-parallel rank {dp_rank} of {dp_size} and {micro_batch_size} rows a microbatch, "
            "expected a rank inside its group and at least one row"
        )


# torchrun and Slurm send the signal that asks a run to save and exit to all processes of a rank. A data-loading worker
# that is killed by it ends the run too, before it can save. So workers ignore it, and exit with the process that they
# read for. A worker is a fork: it has the objects of its parent process, but none of its threads. An object that owns
# threads, such as an uncollected video decoder, must not be collected in it, which would wait for them forever.


def ignoring(number: int | None, begin: Callable[[int], None] | None = None) -> Callable[[int], None]:
    """The `worker_init_fn` of a loader whose workers ignore a signal; `begin` is another one, called first."""
    if number is not None:
        end_workers_at_exit()
    return partial(_begin, number, begin)


def _begin(number: int | None, begin: Callable[[int], None] | None, worker: int) -> None:
    gc.freeze()  # objects from before the fork must not be collected in this process
    if begin is not None:
        begin(worker)
    if number is not None:
        signal.signal(number, signal.SIG_IGN)  # replaces torch's handler, which ends the worker


def end_workers_at_exit() -> None:
    """Make sure that workers that ignore SIGTERM do not keep this process from exiting.

    Python sends SIGTERM to workers that exist when a process exits, as after an error, and waits without a timeout.
    """
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    """Terminate this process's daemons as Python does, and kill those that ignore it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report an error
    daemons = [process for process in multiprocessing.active_children() if process.daemon]
    for process in daemons:
        process.terminate()
    deadline = time.monotonic() + 1.0
    for process in daemons:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
