"""Load the rows of a split: plan, read, encode and assign them to ranks, and yield microbatches for a training loop.

All ranks number the rows in the same way. Of every dp_size * micro_batch_size consecutive rows, each rank takes
micro_batch_size. So a position is one number for all ranks, and a run may resume with another number of ranks. With a
streamed data set, this requires the same number of stream parts as before (`StreamedRows`).
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import batched, count
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from qwen3vl_bridge.config.flops import TowerCosts
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.hub import StreamedDataset
from qwen3vl_bridge.data.mixture import Mixture
from qwen3vl_bridge.data.packing import (
    MixedOrder,
    NumberedOrder,
    PackedPlan,
    PackedRows,
    RowPlan,
    SetCounts,
    Window,
    count_by_set,
    merge_counts,
)
from qwen3vl_bridge.data.samples import DropReason, Samples

import torch
from torch.utils.data import DataLoader, Dataset


class EncodedRow(NamedTuple):
    """One row: its samples, the window in which it was packed, and numbers of dropped samples per data set."""

    samples: tuple[EncodedSample, ...]
    window: Window
    dropped: SetCounts = ()  # in the window of this row or earlier, each sample counted once
    unreadable: SetCounts = ()  # in this row, replaced by a blank token
    newly_dropped: SetCounts = ()  # since the previous row; replaces `dropped` if processes read different parts


class Epoch(NamedTuple):
    """The numbers of samples, rows and tokens in an epoch."""

    samples: int
    rows: float
    tokens: float  # without padding
    is_counted: bool  # not estimated from the first samples


@dataclass(frozen=True)
class Balance:
    """Settings to assign rows to ranks by cost. `over` rows, the global batch size, are assigned together."""

    over: int
    costs: TowerCosts


@dataclass(frozen=True)
class RowSettings:
    """Settings to order samples, pack them into rows, collate them and assign rows to ranks."""

    collator: Collator
    pack: bool = True  # several samples per row; otherwise one, padded
    # Seed of the order of samples, or of rows that were packed before training; None for the order of the file.
    seed: int | None = None
    window_size: int = 512  # samples packed together
    packed: PackedRows | None = None  # rows that were packed before training
    balance: Balance | None = None  # how rows are assigned to ranks; None to assign them in order


def assign_rows(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the indices of the rows of a global batch in an order in which all ranks have similar work.

    Rank r reads the rows at positions r, r + ranks, r + 2 * ranks, ... of the result. The gradient of a step is the sum
    over the same rows for every assignment and number of ranks.

    Raises:
        ValueError: the number of rows is not a multiple of the number of ranks.
    """
    if ranks < 1 or len(costs) % ranks:
        raise ValueError(f"found {len(costs)} rows to assign to {ranks} ranks, expected a multiple of the ranks")
    if ranks == 1:
        return list(range(len(costs)))
    falling = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    totals, order = [0.0] * ranks, list[int]()
    for turn in range(0, len(costs), ranks):
        ranks_by_load = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        assignment = dict(zip(ranks_by_load, falling[turn : turn + ranks], strict=True))
        for rank in range(ranks):
            totals[rank] += costs[assignment[rank]]
            order.append(assignment[rank])
    return order


class RowDataset(Dataset[EncodedRow]):
    """An endless sequence of rows, indexed by row number. `len` returns the number that a training loop requested."""

    def __init__(
        self,
        samples: Samples,
        settings: RowSettings,
        *,
        length: int = 0,
        begin: Window | None = None,
        ranks: int = 1,
        repeat: int | None = None,
    ) -> None:
        """Plan the rows of `samples`. Data-parallel ranks take the rows in turn.

        Args:
            samples: the samples, in the order of their source.
            settings: how samples are ordered, packed and assigned to ranks.
            length: the result of `len`.
            begin: window to start at; None for the first.
            ranks: number of data-parallel ranks.
            repeat: number of rows of an evaluation: the first `repeat` rows are repeated without end. Rows after the
                first epoch have no loss. None to continue with new rows instead.
        """
        self.samples, self.settings, self._len, self.ranks, self.repeat = samples, settings, length, ranks, repeat
        if settings.packed is not None:
            settings.packed.check(self.rules())
            self.plan: PackedPlan | RowPlan = PackedPlan(settings.packed, settings.seed)
        else:
            multiple = settings.collator.multiple if settings.pack else 1
            self.plan = RowPlan(
                lambda index: samples.size(index).padded(multiple),
                self.order(settings.seed),
                capacity=settings.collator.seq_length,
                pack=settings.pack,
                window_size=settings.window_size,
                begin=begin,
                most_patches=samples.sample_filter.most_patches,
                measure=samples.measure,
                set_of=samples.set_index,
            )
        self._assigned: tuple[int, list[int]] | None = None
        if settings.balance and settings.balance.over % ranks:
            raise ValueError(
                f"balance_over is {settings.balance.over}, expected a multiple of the {ranks} data-parallel ranks"
            )

    def starting_at(self, begin: Window) -> RowDataset:
        """Return the same rows, planned from the window `begin` on, to resume a run. Measured sizes are reused."""
        return RowDataset(
            self.samples, self.settings, length=self._len, begin=begin, ranks=self.ranks, repeat=self.repeat
        )

    def order(self, seed: int | None) -> NumberedOrder | MixedOrder | StreamedDataset:
        """Return the order of the samples over epochs. A stream has its own order, a mixture mixes its data sets."""
        source, total = self.samples.source, self.samples.total
        if isinstance(source, StreamedDataset):
            return source
        if isinstance(source, Mixture):
            return source.order(seed)
        assert total is not None  # all others have a known length
        return NumberedOrder(total, seed)

    def epoch(self, *, counted: bool = False) -> Epoch | None:
        """Return the numbers of samples, rows and tokens in the first epoch; None for a stream.

        The plan must begin with that epoch. If `counted` is False and the rows were not packed before training, rows
        and tokens are estimated from the samples of the first packing window.
        """
        order, packed = self.order(self.settings.seed), self.settings.packed
        if isinstance(order, StreamedDataset):
            return None
        total = len(order)
        if packed is not None:
            return Epoch(total, len(packed), packed.tokens(), is_counted=True)
        assert isinstance(self.plan, RowPlan)
        counted |= total <= self.settings.window_size
        if counted:
            rows, read, share = self.plan.end_of_epoch(), total, 1.0
        else:
            after = self.plan.second_window()
            rows, read = after.first_row, after.start
            share = (read - len(after.carried)) / total  # of the samples, in these rows
        tokens = sum(self.samples.size(number).tokens for number in order.sample_numbers(0, 0, read))
        return Epoch(total, rows / share, tokens * total / read, counted)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, number: int) -> EncodedRow:
        """Read and encode one row."""
        over, _ = self.assignment()
        if self.repeat:
            number %= self.repeat
        first, assigned = number - number % over, number  # `over` rows from the first are assigned together
        if over > 1:
            if self._assigned is None or self._assigned[0] != first:
                costs = [self.cost(row) for row in range(first, first + over)]
                self._assigned = (first, assign_rows(costs, self.ranks))
            assigned = first + self._assigned[1][number - first]
        samples = self.plan.row(assigned)
        encoded = tuple(map(self.samples.encode, samples))
        blank = (index for index, sample in zip(samples, encoded, strict=True) if sample.is_blank)
        unreadable = count_by_set(map(self.samples.set_index, blank))
        return EncodedRow(encoded, self.plan.window(first), self.plan.dropped(assigned), unreadable)

    def cost(self, number: int) -> float:
        """Return the FLOPs of a row in the vision tower and the language model. `settings.balance` must be set."""
        assert self.settings.balance is not None
        sizes = [self.samples.size(sample) for sample in self.plan.row(number)]
        return sum(self.settings.balance.costs.count_flops(**size._asdict()) for size in sizes)

    def collate_fn(self, rows: Sequence[EncodedRow]) -> TokenBatch:
        """Collate a microbatch of rows; raise ValueError for several packed rows.

        Megatron-Bridge's training loop requires a method with this name.
        """
        if self.settings.pack and len(rows) != 1:
            raise ValueError(f"micro_batch_size is {len(rows)}, expected 1 with packing: increase seq_length instead")
        collator, pack = self.settings.collator, self.settings.pack
        batch = (
            collator.collate_packed(rows[0].samples)
            if pack
            else collator.collate_padded([row.samples[0] for row in rows])
        )
        batch = replace(
            batch,
            dropped=merge_counts(max, *(row.dropped for row in rows)),
            newly_dropped=merge_counts(sum, *(row.newly_dropped for row in rows)),
            unreadable=merge_counts(sum, *(row.unreadable for row in rows)),
        )
        if self.repeat is None:
            return batch
        return replace(batch, loss_mask=mask_out_rows(batch, [row.window.epoch > 0 for row in rows]))

    def assignment(self) -> tuple[int, int]:
        """Return the number of rows that are assigned to ranks together, and the number of ranks.

        Return (1, 1) if rows are not assigned by cost.
        """
        return (1, 1) if self.settings.balance is None or self.ranks == 1 else (self.settings.balance.over, self.ranks)

    def rules(self) -> dict[str, int | str | None]:
        """Return the data and settings that decide which samples share a row, except for the order of the samples."""
        samples, collator = self.samples, self.settings.collator
        return {
            "samples": samples.total,
            "data": samples.source.fingerprint(),
            "multiple": collator.multiple,
            **samples.sample_filter.fingerprint(),
        }

    def fingerprint(self) -> dict[str, int | str | None]:
        """Return the data and settings that decide which samples are in the row with a given number."""
        settings = self.settings
        return {
            **self.rules(),
            "pack": int(settings.pack),
            "seed": settings.seed,
            "window_size": settings.window_size if settings.packed is None else None,
            "packed": None if settings.packed is None else settings.packed.digest,
        }


def mask_out_rows(batch: TokenBatch, rows: Sequence[bool]) -> torch.Tensor:
    """Return the loss mask [rows, seq_length] of a batch, with zeros in each row for which `rows` is True."""
    return batch.loss_mask.masked_fill(torch.tensor(list(rows)).unsqueeze(-1), 0)


class StreamedRows(RowDataset):
    """Endless rows of a stream that is read in parts, each sample in only one data-loading process.

    Row n is row n // parts of part n % parts. A data-parallel rank takes every dp_size-th microbatch and assigns its
    microbatches to its workers in turn. So if `parts` is a multiple of ranks x workers x rows of a microbatch, all rows
    of a part are read in one process. Each part has its own windows and epochs, and begins its next epoch at its own
    end: no rank waits for another rank.
    """

    def __init__(self, rows: RowDataset, parts: int, counter: Callable[[DropReason], int] | None = None) -> None:
        """Divide the rows of a stream into `parts`; raise DataError if the stream has fewer files than parts.

        Nothing may have been read from the stream before. `counter` counts the dropped samples of all parts, for the
        log; None to count each part separately.
        """
        super().__init__(rows.samples, rows.settings, length=len(rows), ranks=rows.ranks, repeat=rows.repeat)
        assert isinstance(rows.samples.source, StreamedDataset)
        self._parts, self._source, self._counter = parts, rows.samples.source.divide(parts), counter
        self._rows: dict[int, RowDataset] = {}

    def __getitem__(self, number: int) -> EncodedRow:
        """Read and encode one row."""
        if self.repeat:
            number %= self.repeat
        place, part = divmod(number, self._parts)
        if part not in self._rows:
            samples = Samples(self._source.part(part, self._parts), self.samples.sample_filter, counter=self._counter)
            self._rows[part] = RowDataset(samples, self.settings, repeat=self.repeat)
        rows = self._rows[part]
        row = rows[place]
        before = rows.plan.dropped(place - 1) if place else ()
        new = merge_counts(lambda counts: counts[0] - counts[1], row.dropped, before)
        return row._replace(dropped=(), newly_dropped=new)

    def starting_at(self, begin: Window) -> StreamedRows:
        """Return the same rows, planned from the start: a window belongs to one part, so every part is read again."""
        return StreamedRows(self, self._parts, self._counter)

    def fingerprint(self) -> dict[str, int | str | None]:
        """Return the data and settings that decide which samples are in the row with a given number."""
        return {**super().fingerprint(), "data": self._source.fingerprint(), "parts": self._parts}


class BatchStream(Iterator[TokenBatch]):
    """Endless iterator over the microbatches of one data-parallel rank, epoch after epoch."""

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
        """Start at the first row of `rows`.

        `num_workers` processes read and encode ahead, and ignore the signal with the number `ignored_signal`.
        """
        check_dp_rank(dp_rank, dp_size, micro_batch_size)
        self._rows, self._num_workers, self._ignored_signal = rows, num_workers, ignored_signal
        self._first, self._micro_batch_size = dp_rank * micro_batch_size, micro_batch_size
        self._group = dp_size * micro_batch_size
        self._next_row, self._window = 0, Window()
        # The loader, if there is one. `weakref.finalize` keeps the list alive until the stream is gone. Otherwise
        # Python's garbage collector could destroy the objects of a reference cycle in an order in which torch's workers
        # wait forever.
        self._loaders: list[Iterator[tuple[TokenBatch, Window]]] = []
        # Not when the process exits: `_kill_workers` ends the workers then.
        weakref.finalize(self, self._loaders.clear).atexit = False

    def __next__(self) -> TokenBatch:
        """Return the next microbatch; raise DataError if a sample cannot be trained on."""
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
        # The loader must not refer to `self`, which would then never be collected.
        dataset, rows = self._rows, self._micro_batch_size
        start = count(self._next_row + self._first, self._group)
        loader = DataLoader(
            dataset,
            batch_sampler=([first + place for place in range(rows)] for first in start),
            collate_fn=lambda read: (dataset.collate_fn(read), read[0].window),
            num_workers=self._num_workers,
            worker_init_fn=make_worker_init(self._ignored_signal),
            # Not the global generator: a resumed run would differ from an uninterrupted run.
            generator=torch.Generator(),
        )
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream and a fingerprint of its data.

        The state is equal on all data-parallel ranks, except for the entry "window".
        """
        return {
            "row": self._next_row,
            "window": asdict(self._window),
            "data": self._rows.fingerprint(),
            "assigned": self._rows.assignment(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict` of another stream.

        Raises:
            ValueError: the state is for other data or rows, or its position is inside a group of rows that was assigned
                to ranks differently.
        """
        check_position(self._rows.fingerprint(), state["data"])
        check_assignment(state["row"], tuple(state["assigned"]), self._rows.assignment())
        # The state has lists if it went through JSON.
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in state["window"].items()
        }
        window = Window(**known)
        self._next_row, self._window = state["row"], window
        self._rows = self._rows.starting_at(window)
        self._loaders.clear()


def one_pass(
    rows: RowDataset, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1
) -> Iterator[TokenBatch]:
    """Yield the microbatches of one rank in a single pass over the first epoch.

    Ranks take the rows in turn, and every rank gets the same number of microbatches (see `iterate_one_pass`).
    """
    check_dp_rank(dp_rank, dp_size, micro_batch_size)
    numbers = iter(range(rows.plan.end_of_epoch()))
    return iterate_one_pass(
        numbers, lambda some: rows.collate_fn([rows[one] for one in some]), dp_rank, dp_size, micro_batch_size
    )


def iterate_one_pass[Row](
    rows: Iterator[Row], lay_out: Callable[[list[Row]], TokenBatch], dp_rank: int, dp_size: int, micro_batch_size: int
) -> Iterator[TokenBatch]:
    """Yield the microbatches of one rank in a single pass over `rows`, which ranks take in turn.

    `lay_out` builds a batch from `micro_batch_size` rows. If the rows do not divide evenly over the ranks, the last row
    is repeated with a loss mask of zeros.

    Raises:
        DataError: there are no rows.
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
        yield replace(batch, loss_mask=mask_out_rows(batch, [number >= len(group) for number in numbers]))


def check_position(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ValueError if the fingerprint of the data, `found`, differs from the checkpoint's, `expected`."""
    now, then = found.get("parts"), expected.get("parts")
    if then is not None and now is not None and now != then:
        raise ValueError(
            f"the checkpoint's position belongs to a stream of {then} parts, but this run reads {now} parts. Use as "
            f"many data-parallel ranks x data-loading processes as before. Or set dataset.stream_parts={then}, and use "
            f"a number of ranks x processes that divides {then}"
        )
    if names := [name for name in {**expected, **found} if found.get(name) != expected.get(name)]:
        differ = "; ".join(f"{name} {found.get(name)}, expected {expected.get(name)}" for name in names)
        raise ValueError(
            f"the checkpoint position belongs to other data: found {differ}. Continue with the same data and "
            f"settings; "
            "or start a new run in another folder with this checkpoint as initial weights"
        )


def check_assignment(row: int, before: tuple[int, int], now: tuple[int, int]) -> None:
    """Raise ValueError if row number `row` is inside a group of rows that was assigned to ranks differently before.

    `before` and `now`: how many rows are assigned together, and to how many ranks.
    """
    if before != now and any(row % over for over, _ in (before, now)):
        raise ValueError(
            f"the checkpoint's position is row {row}, inside a group of rows. The earlier run divided groups of "
            f"{before[0]} rows over {before[1]} data-parallel ranks, this run divides {now[0]} rows over {now[1]} "
            "ranks. Use the same dataset.balance_over and number of data-parallel ranks, or a checkpoint that was "
            "saved between global batches"
        )


def check_dp_rank(dp_rank: int, dp_size: int, micro_batch_size: int = 1) -> None:
    """Raise ValueError if a data-parallel rank is outside its group, or a microbatch has no rows."""
    if not 0 <= dp_rank < dp_size or micro_batch_size < 1:
        raise ValueError(
            f"found data-parallel rank {dp_rank} of {dp_size}, expected a rank from 0 to {dp_size - 1}; found "
            f"{micro_batch_size} rows in a microbatch, expected at least 1"
        )


# torchrun and Slurm send the signal that asks a run to save and exit to all processes of a rank. If it killed a
# data-loading worker, the run would end before it can save. So workers ignore the signal, and exit with the process
# that they read for. A worker is a fork: it has the objects of its parent process, but no threads. An object that owns
# threads, such as a video decoder, must not be collected in a worker, because that would wait for its threads forever.


def make_worker_init(number: int | None, begin: Callable[[int], None] | None = None) -> Callable[[int], None]:
    """Return a `worker_init_fn` for a DataLoader, with which workers ignore the signal `number`.

    The function calls `begin` first. If `number` is None, no signal is ignored.
    """
    if number is not None:
        kill_workers_at_exit()
    return partial(_init_worker, number, begin)


def _init_worker(number: int | None, begin: Callable[[int], None] | None, worker: int) -> None:
    gc.freeze()  # do not collect objects from before the fork in this process
    if begin is not None:
        begin(worker)
    if number is not None:
        signal.signal(number, signal.SIG_IGN)  # replaces torch's handler, which ends the worker


def kill_workers_at_exit() -> None:
    """Ensure that workers that ignore SIGTERM do not keep this process from exiting.

    When a process exits, for example after an error, Python sends SIGTERM to its workers and waits without a timeout.
    """
    Finalize(None, _kill_workers, exitpriority=0)


def _kill_workers() -> None:
    """Send SIGTERM to the daemonic child processes of this process, and SIGKILL to those that do not exit."""
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
