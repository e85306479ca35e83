"""Rows of a split, planned, read, encoded and assigned to ranks; and microbatches of them for a training loop.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import batched, count
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from qwen3vl_bridge.batch import TokenBatch
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.packing.row_plan import (
    MixedOrder,
    NumberedOrder,
    PackedPlan,
    PackedRows,
    RowPlan,
    SetCounts,
    Window,
    count_sets,
    merge_counts,
)
from qwen3vl_bridge.data.packing.sample_sizes import Left
from qwen3vl_bridge.data.samples import Samples
from qwen3vl_bridge.data.sources.hub import StreamedDataset
from qwen3vl_bridge.data.sources.mixture import Mixture
from qwen3vl_bridge.models.flops import TowerCosts

import torch
from torch.utils.data import DataLoader, Dataset


class EncodedRow(NamedTuple):
    """One row's samples, the plan's window from which it is reached, and numbers of dropped samples by data set."""

    samples: tuple[EncodedSample, ...]
    window: Window
    dropped: SetCounts = ()  # in this row's window or earlier, over all epochs
    unreadable: SetCounts = ()  # in this row, replaced by a blank token
    newly_dropped: SetCounts = ()  # instead of `dropped`, if other processes read other parts: since the previous row


class Epoch(NamedTuple):
    """The samples of an epoch, and the rows that they fill."""

    samples: int
    rows: float
    tokens: float  # without padding
    is_counted: bool  # not estimated from the first samples


@dataclass(frozen=True)
class Balance:
    """How rows are assigned to data-parallel ranks: `over` together, the global batch size, by the towers' costs."""

    over: int
    costs: TowerCosts


@dataclass(frozen=True)
class RowSettings:
    """Settings of rows."""

    collator: Collator
    pack: bool = True  # several samples per row; otherwise one, padded
    # Of the samples' order, or of the rows' if they were packed before training; None for the file's own order.
    seed: int | None = None
    window_size: int = 512  # samples packed together
    packed: PackedRows | None = None  # rows that were packed before training
    balance: Balance | None = None  # how rows are assigned to ranks; None for in order


def assign_rows(costs: Sequence[float], ranks: int) -> list[int]:
    """The order in which the rows of a global batch are read, by their costs, so that all ranks have equal work.

    Rank r reads positions r, r + ranks, r + 2 * ranks, ... Ranks wait for each other at the end of a step, and with
    sharded parameters or experts in every microbatch. So the rows of a turn have similar costs, and within a turn the
    rank with the lowest total so far gets the most expensive row. Rows are assigned only within a global batch, so the
    gradient of a step is the sum over the same rows for every assignment and number of ranks. A `ValueError` if the
    number of rows is not a multiple of the ranks.
    """
    if ranks < 1 or len(costs) % ranks:
        raise ValueError(f"found {len(costs)} rows to assign to {ranks} ranks, expected a multiple of the ranks")
    if ranks == 1:
        return list(range(len(costs)))
    falling = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    totals, order = [0.0] * ranks, list[int]()
    for turn in range(0, len(costs), ranks):
        hungriest_first = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        hand = dict(zip(hungriest_first, falling[turn : turn + ranks], strict=True))
        for rank in range(ranks):
            totals[rank] += costs[hand[rank]]
            order.append(hand[rank])
    return order


class RowDataset(Dataset[EncodedRow]):
    """Endless rows by number; `len` only returns the number that a loop asked for."""

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
        """Plan rows of samples from a window on, for data-parallel ranks that read in turn; `len` returns `length`.

        `repeat` is the number of rows that are repeated without end, always the first of the plan; those after its
        epoch have no loss. None to continue without repetition.
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
                set_of=samples.set_of,
            )
        self._assigned: tuple[int, list[int]] | None = None
        if settings.balance and settings.balance.over % ranks:
            raise ValueError(
                f"{settings.balance.over} rows are assigned to {ranks} data-parallel ranks, expected a multiple"
            )

    def begun_at(self, begin: Window) -> RowDataset:
        """The same rows, planned from a window on. Samples that were read and measured are reused."""
        return RowDataset(
            self.samples, self.settings, length=self._len, begin=begin, ranks=self.ranks, repeat=self.repeat
        )

    def order(self, seed: int | None) -> NumberedOrder | MixedOrder | StreamedDataset:
        """Order of the samples over epochs. A stream has its own order, a mixture one that mixes its data sets."""
        file, total = self.samples.file, self.samples.total
        if isinstance(file, StreamedDataset):
            return file
        if isinstance(file, Mixture):
            return file.order(seed)
        assert total is not None  # all others have a known length
        return NumberedOrder(total, seed)

    def epoch(self, *, counted: bool = False) -> Epoch | None:
        """The first epoch, if the plan begins with it; None for a stream, whose length is not known.

        Without `counted`, a long one whose rows are not packed is estimated from its first window, instead of measuring
        all samples.
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
            after = self.plan.after_first()
            rows, read = after.first_row, after.start
            share = (read - len(after.carried)) / total  # of the samples, in these rows
        tokens = sum(self.samples.size(number).tokens for number in order.numbers(0, 0, read))
        return Epoch(total, rows / share, tokens * total / read, counted)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, number: int) -> EncodedRow:
        """Read and encode one row."""
        over, _ = self.assignment()
        number %= self.repeat or number + 1
        first, assigned = number - number % over, number  # `over` rows from the first are assigned together
        if over > 1:
            if self._assigned is None or self._assigned[0] != first:
                costs = [self.cost(row) for row in range(first, first + over)]
                self._assigned = (first, assign_rows(costs, self.ranks))
            assigned = first + self._assigned[1][number - first]
        samples = self.plan.row(assigned)
        encoded = tuple(map(self.samples.encode, samples))
        blank = (index for index, sample in zip(samples, encoded, strict=True) if sample.is_blank)
        unreadable = count_sets(map(self.samples.set_of, blank))
        return EncodedRow(encoded, self.plan.window(first), self.plan.dropped(assigned), unreadable)

    def cost(self, number: int) -> float:
        """Cost of one of the plan's rows in both towers, if the settings have a balance."""
        assert self.settings.balance is not None
        sizes = [self.samples.size(sample) for sample in self.plan.row(number)]
        return sum(self.settings.balance.costs.of(**size._asdict()) for size in sizes)

    def collate_fn(self, rows: Sequence[EncodedRow]) -> TokenBatch:
        """A microbatch of rows, only one if packed (ValueError). Megatron-Bridge's loop requires the name."""
        if self.settings.pack and len(rows) != 1:
            raise ValueError(f"found a microbatch of {len(rows)} packed rows, expected 1: make the row longer instead")
        collator, pack = self.settings.collator, self.settings.pack
        batch = collator.packed(rows[0].samples) if pack else collator.padded([row.samples[0] for row in rows])
        batch = replace(
            batch,
            dropped=merge_counts(max, *(row.dropped for row in rows)),
            newly_dropped=merge_counts(sum, *(row.newly_dropped for row in rows)),
            unreadable=merge_counts(sum, *(row.unreadable for row in rows)),
        )
        if self.repeat is None:
            return batch
        return replace(batch, loss_mask=without_loss(batch, [row.window.epoch > 0 for row in rows]))

    def assignment(self) -> tuple[int, int]:
        """How many rows are assigned together, and to how many ranks."""
        return (1, 1) if self.settings.balance is None or self.ranks == 1 else (self.settings.balance.over, self.ranks)

    def rules(self) -> dict[str, int | str | None]:
        """Whatever must be equal for samples to be packed into the same rows, except for their order."""
        samples, collator = self.samples, self.settings.collator
        return {
            "samples": samples.total,
            "data": samples.file.fingerprint(),
            "multiple": collator.multiple,
            **samples.sample_filter.fingerprint(),
        }

    def fingerprint(self) -> dict[str, int | str | None]:
        """Whatever must be equal for a row's number to mean the same row."""
        settings = self.settings
        return {
            **self.rules(),
            "pack": int(settings.pack),
            "seed": settings.seed,
            "window_size": settings.window_size if settings.packed is None else None,
            "packed": None if settings.packed is None else settings.packed.digest,
        }


def without_loss(batch: TokenBatch, rows: Sequence[bool]) -> torch.Tensor:
    """[B, S] the batch's loss mask, zero in the marked rows."""
    return batch.loss_mask.masked_fill(torch.tensor(list(rows)).unsqueeze(-1), 0)


class StreamedRows(RowDataset):
    """Endless rows of a stream that is read in parts, each sample in only one data-loading process.

    Row n is row n // parts of part n % parts. A data-parallel rank takes every dp_size-th microbatch and assigns its
    own to its workers in turn; so if `parts` is a multiple of ranks x workers x rows of a microbatch, all rows of a
    part are read in one process. Each part has its own windows and epochs, and begins its next epoch at its own end: no
    rank waits for another's.
    """

    def __init__(self, whole: RowDataset, parts: int, note: Callable[[Left], int] | None = None) -> None:
        """Divide the rows of a whole stream, none of which has been read; it needs as many files as parts (DataError).

        `note` counts the dropped samples of all parts, for the log; None to count each part separately.
        """
        super().__init__(whole.samples, whole.settings, length=len(whole), ranks=whole.ranks, repeat=whole.repeat)
        assert isinstance(whole.samples.file, StreamedDataset)
        self._parts, self._file, self._note = parts, whole.samples.file.divided(parts), note
        self._rows: dict[int, RowDataset] = {}

    def __getitem__(self, number: int) -> EncodedRow:
        """Read and encode one row."""
        number %= self.repeat or number + 1
        place, part = divmod(number, self._parts)
        if part not in self._rows:
            samples = Samples(self._file.part(part, self._parts), self.samples.sample_filter, note=self._note)
            self._rows[part] = RowDataset(samples, self.settings, repeat=self.repeat)
        rows = self._rows[part]
        row = rows[place]
        before = rows.plan.dropped(place - 1) if place else ()
        new = merge_counts(lambda counts: counts[0] - counts[1], row.dropped, before)
        return row._replace(dropped=(), newly_dropped=new)

    def begun_at(self, begin: Window) -> StreamedRows:
        """The same rows. A position has the window of only one part, so all are read again from the start."""
        return StreamedRows(self, self._parts, self._note)

    def fingerprint(self) -> dict[str, int | str | None]:
        """Whatever must be equal for a row's number to mean the same row."""
        return {**super().fingerprint(), "data": self._file.fingerprint(), "parts": self._parts}


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
        raise ValueError(
            f"the checkpoint's position belongs to other data: found {differ}. Continue with the data and settings of "
            "before; or start a new run, in another folder, from this checkpoint as its initial weights"
        )


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
