"""Rows of a split: what the plan says, read and encoded.

What lives here: the dataset that the loop reads rows from. What may not: what a sample is
(`data/processing/samples.py`), positions in a run (`batch_stream.py`), Megatron (`data/provider.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Protocol

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.loading.balance import assign_rows
from qwen3vl_bridge.data.packing.packed_rows import PackedRows
from qwen3vl_bridge.data.packing.row_plan import RowPlan, Window
from qwen3vl_bridge.data.packing.sample_order import NumberedOrder, Order
from qwen3vl_bridge.data.packing.sample_sizes import Size
from qwen3vl_bridge.data.packing.set_counts import SetCounts, add_counts, count_sets, most_of
from qwen3vl_bridge.data.processing.collation import Collator
from qwen3vl_bridge.data.processing.encoding import EncodedSample
from qwen3vl_bridge.data.processing.samples import Samples
from qwen3vl_bridge.data.sources.mixture import Mixture
from qwen3vl_bridge.models.common.flops import TowerCosts

import torch
from torch.utils.data import Dataset


class Row(NamedTuple):
    """One row's samples, a window of the plan from which it is reached, and what of the data is left out.

    Attributes:
        samples: in their order.
        window: from which the row is reached.
        dropped: of each set, samples in no row of this row's window or before; in all epochs, each time.
        newly_dropped: in place of it, where others read other parts of the data: samples dropped since the row before.
        unreadable: of each set, samples of this row whose place is left empty.
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
        over: rows among which they are, the global batch.
        costs: of the two towers.
    """

    over: int
    costs: TowerCosts


@dataclass(frozen=True)
class RowSettings:
    """What a row is.

    Attributes:
        collator: lays samples out.
        pack: several samples in a row; otherwise one, padded.
        seed: of the samples' order, or of the rows' where they were packed before; None for the file's own.
        window_size: samples that are packed together.
        packed: rows that were packed before; None to pack as they are read.
        balance: how rows are assigned; None for as they come.
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
        """Where to go on from to reach a row."""
        ...

    def dropped(self, number: int) -> SetCounts:
        """Of each set, how many samples are left out of the rows up to this one."""
        ...

    def end_of_epoch(self) -> int:
        """Number of the first row after the epoch that the plan begins in."""
        ...


class RowDataset(Dataset[Row]):
    """Rows by number, without end; `len` is only how many a loop says it wants."""

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
            settings: what a row is.
            length: what `len` answers.
            begin: window of the plan to go on from.
            ranks: data-parallel ranks, which take turns; where rows are assigned to them.
            repeat: rows that are the same ones over and over, each time the first of the plan; those after its epoch
                have nothing to train on. None for other ones always.

        Raises:
            ValueError: rows that were packed by other rules than these, or that cannot be assigned.
        """
        self.samples, self.settings, self._len, self.ranks, self.repeat = samples, settings, length, ranks, repeat
        self.plan = self._plan(begin)
        self._assigned: tuple[int, list[int]] | None = None
        if settings.balance and settings.balance.over % ranks:
            raise ValueError(
                f"{settings.balance.over} rows are assigned to {ranks} data-parallel ranks, expected a multiple"
            )

    def begun_at(self, begin: Window) -> RowDataset:
        """The same rows, planned from a window on. What was read and measured serves again."""
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
        """In which epochs read the samples. A stream has an order of its own, a mixture one that mixes its sets."""
        file, total = self.samples.file, self.samples.total
        if isinstance(file, Order):
            return file
        if isinstance(file, Mixture):
            return file.order(seed)
        assert total is not None  # all others know how many they have
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
        """The plan's number of a row."""
        over, _ = self.assignment()
        if over == 1:
            return number
        first, place = number - number % over, number % over
        if self._assigned is None or self._assigned[0] != first:
            costs = [self.cost(row) for row in range(first, first + over)]
            self._assigned = (first, assign_rows(costs, self.ranks))
        return first + self._assigned[1][place]

    def cost(self, number: int) -> float:
        """What one of the plan's rows costs both towers.

        Raises:
            ValueError: rows are not assigned by cost.
        """
        if self.settings.balance is None:
            raise ValueError("found no costs of the towers, expected a balance in the settings")
        sizes = [self.samples.size(sample) for sample in self.plan.row(number)]
        return sum(self.settings.balance.costs.of(**size._asdict()) for size in sizes)

    def collate_fn(self, rows: Sequence[Row]) -> PackedBatch:
        """A microbatch of rows. Megatron-Bridge's loop looks for a function of this name.

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
        """What must be the same for samples to be packed into the same rows, but for their order."""
        samples, collator = self.samples, self.settings.collator
        return {
            "samples": samples.total,
            "data": samples.file.fingerprint(),
            "multiple": collator.multiple,
            **samples.sample_filter.fingerprint(),
        }

    def fingerprint(self) -> dict[str, int | str | None]:
        """What must be the same for a row's number to mean the same row."""
        settings = self.settings
        return {
            **self.rules(),
            "pack": int(settings.pack),
            "seed": settings.seed,
            "window_size": settings.window_size if settings.packed is None else None,
            "packed": None if settings.packed is None else settings.packed.digest,
        }


def without_loss(batch: PackedBatch, rows: Sequence[bool]) -> torch.Tensor:
    """[B, S] the batch's loss mask with nothing to train on in the rows marked."""
    return batch.loss_mask.masked_fill(torch.tensor(list(rows)).unsqueeze(-1), 0)
