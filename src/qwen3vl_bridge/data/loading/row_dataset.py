"""Rows of a split: planned, read and encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Protocol

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.loading.balance import assign_rows
from qwen3vl_bridge.data.packing.packed_rows import PackedRows
from qwen3vl_bridge.data.packing.row_plan import (
    NumberedOrder,
    Order,
    RowPlan,
    SetCounts,
    Window,
    add_counts,
    count_sets,
    most_of,
)
from qwen3vl_bridge.data.packing.sample_sizes import Size
from qwen3vl_bridge.data.samples import Samples
from qwen3vl_bridge.data.sources.mixture import Mixture
from qwen3vl_bridge.models.flops import TowerCosts

import torch
from torch.utils.data import Dataset


class Row(NamedTuple):
    """One row's samples, the window of the plan from which it is reached, and numbers of dropped samples.

    Attributes:
        samples: in their order.
        window: from which the row is reached.
        dropped: per data set, samples dropped in this row's window or earlier, over all epochs.
        newly_dropped: used instead if other processes read other parts of the data: samples dropped since the previous
            row.
        unreadable: per data set, samples of this row that were replaced by a blank token.
    """

    samples: tuple[EncodedSample, ...]
    window: Window
    dropped: SetCounts = ()
    unreadable: SetCounts = ()
    newly_dropped: SetCounts = ()


@dataclass(frozen=True)
class Balance:
    """How rows are assigned to data-parallel ranks.

    Attributes:
        over: number of rows that are assigned together, the global batch size.
        costs: of the two towers.
    """

    over: int
    costs: TowerCosts


@dataclass(frozen=True)
class RowSettings:
    """Settings of rows.

    Attributes:
        collator: lays samples out.
        pack: several samples per row; otherwise one, padded.
        seed: of the samples' order, or of the rows' if they were packed before training; None for the file's own order.
        window_size: number of samples packed together.
        packed: rows that were packed before training; None to pack during training.
        balance: how rows are assigned; None for in order.
    """

    collator: Collator
    pack: bool = True
    seed: int | None = None
    window_size: int = 512
    packed: PackedRows | None = None
    balance: Balance | None = None


class Plan(Protocol):
    """Samples of rows by the rows' numbers, without end."""

    def row(self, number: int) -> tuple[int, ...]:
        """Samples of one row."""
        ...

    def window(self, number: int) -> Window:
        """The window from which a row is reached, for resuming."""
        ...

    def dropped(self, number: int) -> SetCounts:
        """Per data set, the number of samples dropped up to this row."""
        ...

    def end_of_epoch(self) -> int:
        """Number of the first row after the epoch that the plan begins in."""
        ...


class RowDataset(Dataset[Row]):
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
        """Rows of samples.

        Args:
            samples: what to read.
            settings: settings of rows.
            length: the result of `len`.
            begin: window of the plan to continue from.
            ranks: data-parallel ranks, which read in turn; used if rows are assigned to them.
            repeat: number of rows that are repeated without end, always the first of the plan; those after its epoch
                have no loss. None to continue without repetition.

        Raises:
            ValueError: rows that were packed with other settings, or that cannot be assigned.
        """
        self.samples, self.settings, self._len, self.ranks, self.repeat = samples, settings, length, ranks, repeat
        self.plan = self._plan(begin)
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

    def _plan(self, begin: Window | None) -> Plan:
        settings = self.settings
        if settings.packed is not None:
            settings.packed.check(self.rules())
            return settings.packed.plan(settings.seed)
        return RowPlan(
            self._size_in_row,
            self.order(settings.seed),
            capacity=settings.collator.seq_length,
            pack=settings.pack,
            window_size=settings.window_size,
            begin=begin,
            most_patches=self.samples.sample_filter.most_patches,
            report=settings.seed is not None,
            measure=self.samples.measure,
            set_of=self.samples.file.set_of if isinstance(self.samples.file, Mixture) else None,
        )

    def order(self, seed: int | None) -> Order:
        """Order of the samples over epochs. A stream has its own order, a mixture one that mixes its data sets."""
        file, total = self.samples.file, self.samples.total
        if isinstance(file, Order):
            return file
        if isinstance(file, Mixture):
            return file.order(seed)
        assert total is not None  # all others have a known length
        return NumberedOrder(total, seed)

    def _size_in_row(self, index: int) -> Size:
        return self.samples.size(index).padded(self.settings.collator.multiple if self.settings.pack else 1)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, number: int) -> Row:
        """Read and encode one row."""
        over, _ = self.assignment()
        number %= self.repeat or number + 1
        assigned = self._assigned_row(number)
        samples = self.plan.row(assigned)
        encoded = tuple(map(self.samples.encode, samples))
        file = self.samples.file
        empty = [sample for sample, one in zip(samples, encoded, strict=True) if one.is_blank]
        unreadable = count_sets(file.set_of(sample) if isinstance(file, Mixture) else 0 for sample in empty)
        return Row(encoded, self.plan.window(number - number % over), self.plan.dropped(assigned), unreadable)

    def _assigned_row(self, number: int) -> int:
        """The plan's number for a row."""
        over, _ = self.assignment()
        if over == 1:
            return number
        first, place = number - number % over, number % over
        if self._assigned is None or self._assigned[0] != first:
            costs = [self.cost(row) for row in range(first, first + over)]
            self._assigned = (first, assign_rows(costs, self.ranks))
        return first + self._assigned[1][place]

    def cost(self, number: int) -> float:
        """Cost of one of the plan's rows in both towers.

        Raises:
            ValueError: rows are not assigned by cost.
        """
        if self.settings.balance is None:
            raise ValueError("found no costs of the towers, expected a balance in the settings")
        sizes = [self.samples.size(sample) for sample in self.plan.row(number)]
        return sum(self.settings.balance.costs.of(**size._asdict()) for size in sizes)

    def collate_fn(self, rows: Sequence[Row]) -> PackedBatch:
        """A microbatch of rows. The name is required by Megatron-Bridge's loop.

        Raises:
            ValueError: several packed rows.
        """
        if self.settings.pack and len(rows) != 1:
            raise ValueError(f"found a microbatch of {len(rows)} packed rows, expected 1: make the row longer instead")
        collator = self.settings.collator
        packed = self.settings.pack
        batch = collator.packed(rows[0].samples) if packed else collator.padded([row.samples[0] for row in rows])
        batch = replace(
            batch,
            dropped=reduce(most_of, [row.dropped for row in rows]),
            newly_dropped=reduce(add_counts, [row.newly_dropped for row in rows]),
            unreadable=reduce(add_counts, [row.unreadable for row in rows]),
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


def without_loss(batch: PackedBatch, rows: Sequence[bool]) -> torch.Tensor:
    """[B, S] the batch's loss mask, zero in the marked rows."""
    return batch.loss_mask.masked_fill(torch.tensor(list(rows)).unsqueeze(-1), 0)
