"""Rows of a split: planned, read, encoded and assigned to ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from qwen3vl_bridge.batch import TokenBatch
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.packing.packed_rows import PackedPlan, PackedRows
from qwen3vl_bridge.data.packing.row_plan import (
    NumberedOrder,
    Order,
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
from torch.utils.data import Dataset


class EncodedRow(NamedTuple):
    """One row's samples, the plan's window from which it is reached, and numbers of dropped samples by data set."""

    samples: tuple[EncodedSample, ...]
    window: Window
    dropped: SetCounts = ()  # in this row's window or earlier, over all epochs
    unreadable: SetCounts = ()  # in this row, replaced by a blank token
    newly_dropped: SetCounts = ()  # instead of `dropped`, if other processes read other parts: since the previous row


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

    def order(self, seed: int | None) -> Order:
        """Order of the samples over epochs. A stream has its own order, a mixture one that mixes its data sets."""
        file, total = self.samples.file, self.samples.total
        if isinstance(file, StreamedDataset):
            return file
        if isinstance(file, Mixture):
            return file.order(seed)
        assert total is not None  # all others have a known length
        return NumberedOrder(total, seed)

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
