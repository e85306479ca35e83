"""The endless sequence of rows of a run: equal on every rank and in every process.

Each epoch is an order of the samples, cut into windows. A window's samples are packed into rows together, and the
samples of the emptiest row are carried over to the next window; the last window of an epoch keeps all of its rows. So
every sample is in exactly one row of every epoch. A `Window` is all that a plan needs to resume.

Rows packed before training are a folder of numpy arrays, which are memory-mapped so that all processes of a machine
share them: `sizes` [samples, 3] as in `Size`, `rows` with the concatenated samples of all rows, `starts` [rows + 1]
with each row's offset in it; and `packing.json` with the packing rules. It has neither text nor images nor tokens.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, zip_longest
from math import floor
from pathlib import Path
from typing import Any, Protocol

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.packing.sample_sizes import Size, Sizes
from qwen3vl_bridge.io.parsing import read_json

import numpy as np
import torch

# By index of the data set; trailing zeros may be missing.
SetCounts = tuple[int, ...]


def count_sets(sets: Iterable[int]) -> SetCounts:
    """How often each data set occurs among these."""
    counts = Counter(sets)
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))


def merge_counts(merge: Callable[[tuple[int, ...]], int], *counts: SetCounts) -> SetCounts:
    """The `sum`, `max` or another function of each data set's counts."""
    return tuple(map(merge, zip_longest(*counts, fillvalue=0)))


_KEPT = 2  # epochs: a window may extend over an epoch's end
_SEEDS = 1_000_003  # distance of seeds, so that epochs of one seed are not those of the next


class Order(Protocol):
    """Samples by their position in an epoch; equal in every process."""

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Numbers of the samples at positions `start` to `start + count - 1`; fewer, or none, if the epoch ends."""
        ...


class NumberedOrder(Order):
    """Samples 0 to n - 1, in numerical or in random order, different in each epoch."""

    def __init__(self, num_samples: int, seed: int | None = None) -> None:
        """Order n samples by a seed, or in numerical order without one; `ValueError` without samples."""
        if num_samples < 1:
            raise ValueError(f"found {num_samples} samples, expected at least 1")
        self._num_samples, self._seed = num_samples, seed
        self._shuffled = dict[int, torch.Tensor]()  # by epoch

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self._num_samples

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """See `Order`."""
        end = min(start + count, self._num_samples)
        if self._seed is None:
            return range(start, end)
        if epoch not in self._shuffled:
            # One generator per epoch, so that any epoch can be resumed without the previous ones.
            generator = torch.Generator().manual_seed((self._seed * _SEEDS + epoch) % 2**63)
            self._shuffled[epoch] = _narrow(torch.randperm(self._num_samples, generator=generator))
            if len(self._shuffled) > _KEPT:
                del self._shuffled[next(iter(self._shuffled))]
        return self._shuffled[epoch][start:end].tolist()


class MixedOrder(Order):
    """Samples of several data sets, numbered one data set after the other, with a given number per epoch from each.

    A data set is read pass after pass, each sample once per pass and each pass in a different order; an epoch takes the
    next part of that. So after any number of epochs all samples of a data set have been read equally often, or once
    more than others, also if an epoch takes 0.3 or 2.5 times the data set.

    Within an epoch, the k-th of n samples of a data set has a time drawn from [k / n, (k + 1) / n), or the middle of it
    without a seed, and samples are sorted by time. So the shares of data sets hold in every part of the epoch.
    """

    def __init__(self, lengths: Sequence[int], taken: Sequence[Fraction], seed: int | None = None) -> None:
        """Order the samples of data sets of these lengths; a `ValueError` for one without a share, or empty epochs.

        `taken` is the number of samples of each data set per epoch, on average if it is not an integer. Without a seed
        the order within each data set is numerical.
        """
        if any(number <= 0 for number in taken) or sum(map(floor, taken)) < 1:
            found = ", ".join(f"{float(number):g} of {length}" for number, length in zip(taken, lengths, strict=True))
            raise ValueError(
                f"found epochs that take {found} samples, expected more than 0 of each and 1 of one at least"
            )
        self._lengths, self._taken, self._seed = tuple(lengths), tuple(taken), seed
        self._firsts = [0, *accumulate(lengths)]
        seeds = [None if seed is None else seed * _SEEDS + number for number in range(len(lengths))]
        self._sets = [NumberedOrder(length, own) for length, own in zip(lengths, seeds, strict=True)]
        self._merged = dict[int, torch.Tensor]()  # by epoch

    def __len__(self) -> int:
        """Samples of the first epoch."""
        return sum(self._passed(1))

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """See `Order`."""
        begun, ended = self._passed(epoch), self._passed(epoch + 1)
        before = [0, *accumulate(end - begin for begin, end in zip(begun, ended, strict=True))]
        found = []
        for drawn in self._merged_of(epoch, before)[start : start + count].tolist():
            number = bisect_right(before, drawn) - 1  # skips data sets without samples
            passed, place = divmod(begun[number] + drawn - before[number], self._lengths[number])
            found.append(self._firsts[number] + self._sets[number].numbers(passed, place, 1)[0])
        return found

    def _passed(self, epoch: int) -> list[int]:
        """Number of samples of each data set that were read before an epoch."""
        return [floor(epoch * number) for number in self._taken]

    def _merged_of(self, epoch: int, before: Sequence[int]) -> torch.Tensor:
        """[samples] int32, or int64 from 2**31 on: the epoch's samples by their times, numbered by data set."""
        if epoch not in self._merged:
            counts = [end - begin for begin, end in pairwise(before)]
            within = torch.full((before[-1],), 0.5, dtype=torch.float64)
            if self._seed is not None:
                generator = torch.Generator().manual_seed((self._seed * _SEEDS * _SEEDS + epoch - _SEEDS) % 2**63)
                within = torch.rand(before[-1], dtype=torch.float64, generator=generator)
            parts = zip(within.split(counts), counts, strict=True)
            times = torch.cat([(torch.arange(count, dtype=torch.float64) + part) / count for part, count in parts])
            self._merged[epoch] = _narrow(times.argsort(stable=True))
            if len(self._merged) > _KEPT:
                del self._merged[next(iter(self._merged))]
        return self._merged[epoch]


def _narrow(order: torch.Tensor) -> torch.Tensor:
    """[samples] int32, or int64 from 2**31 on: every process keeps the order of a whole epoch."""
    return order.int() if len(order) < 2**31 else order


_SHELVES, _LOOKS = 16, 32


def best_fit(
    lengths: Sequence[int], capacity: int, patches: Sequence[int] | None = None, most_patches: int | None = None
) -> list[list[int]]:
    """Rows of sample numbers, by best-fit decreasing; a `ValueError` for a sample that no row holds.

    Samples in descending order of size go each into the row with the least space that is sufficient. The rows, and the
    samples in one, are in ascending order of their first sample.
    """
    if patches is None or most_patches is None:
        patches, most_patches = [0] * len(lengths), 1
    # The size of a sample is the larger of its fractions of a row's tokens and patches.
    share = [max(n / capacity, p / most_patches) for n, p in zip(lengths, patches, strict=True)]
    rows, room = list[list[int]](), _Room(most_patches)
    for sample in sorted(range(len(lengths)), key=lambda sample: (-share[sample], sample)):
        length, pixels = lengths[sample], patches[sample]
        if not 1 <= length <= capacity:
            raise ValueError(f"sample {sample} has {length} tokens, expected 1 to {capacity}")
        if not 0 <= pixels <= most_patches:
            raise ValueError(f"sample {sample} has {pixels} patches, expected at most {most_patches}")
        left, row, left_patches = room.take(length, pixels) or (capacity, len(rows), most_patches)
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        room.put(left - length, row, left_patches - pixels)
    return sorted(sorted(row) for row in rows)


class _Room:
    """Free space of rows, grouped by free patches so that full rows are not searched."""

    def __init__(self, most_patches: int) -> None:
        self._shelves: list[list[tuple[int, int, int]]] = [[] for _ in range(min(_SHELVES, most_patches + 1))]
        self._most = most_patches + 1

    def put(self, tokens: int, row: int, patches: int) -> None:
        if tokens:
            insort(self._shelves[patches * len(self._shelves) // self._most], (tokens, row, patches))

    def take(self, tokens: int, patches: int) -> tuple[int, int, int] | None:
        """Free tokens, number and free patches of the row with the least space that is sufficient, if there is one."""
        lowest, found = patches * len(self._shelves) // self._most, []
        for number in range(lowest, len(self._shelves)):
            shelf = self._shelves[number]
            first = bisect_left(shelf, (tokens, 0, 0))
            # Rows of the lowest group may have too few patches; most of them need not be searched.
            fitting = range(first, min(len(shelf), first + _LOOKS))
            place = next((place for place in fitting if shelf[place][2] >= patches), None)
            if place is not None:
                found.append((shelf[place], number, place))
        if not found:
            return None
        entry, number, place = min(found)
        del self._shelves[number][place]
        return entry


Row = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """The start of a window."""

    epoch: int = 0
    start: int = 0  # position in the epoch's order of its first new sample
    carried: Row = ()  # samples from the previous window
    first_row: int = 0  # number of rows before it, over all epochs
    dropped: SetCounts = ()  # samples before it that were dropped (bad or too long), over all epochs


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
        measure: Callable[[Sequence[int]], None] | None = None,
        set_of: Callable[[int], int] = lambda sample: 0,
    ) -> None:
        """Plan rows of at most `capacity` tokens and `most_patches` patches; without `pack`, each sample is a row.

        `size` is the space of a sample in a row, with its padding; no tokens to drop it. `measure` is called with the
        samples whose sizes are needed next. `set_of` is the index of a sample's data set, for counts of dropped ones.
        """
        if window_size < 1:
            raise ValueError(f"found windows of {window_size} samples, expected at least 1")
        self._size, self._order, self._capacity, self._most_patches = size, order, capacity, most_patches
        self._pack, self._window_size, self._measure, self._set_of = pack, window_size, measure, set_of
        self._windows = [begin or Window()]
        self._latest: tuple[Window, list[Row], Window] | None = None  # that was packed, its rows, and the one after it

    def row(self, number: int) -> Row:
        """Samples of one row; `IndexError` for one before the window `begin`, `DataError` if an epoch has no rows."""
        window = self.window(number)
        return self._pack_window(window)[0][number - window.first_row]

    def window(self, number: int) -> Window:
        """The window that contains a row."""
        if number < self._windows[0].first_row:
            raise IndexError(f"row {number} is before row {self._windows[0].first_row}, where this plan begins")
        while self._windows[-1].first_row <= number:
            self._extend()
        return self._windows[bisect_right(self._windows, number, key=lambda window: window.first_row) - 1]

    def dropped(self, number: int) -> SetCounts:
        """Per data set, the number of samples dropped in this row's window or before."""
        return self._pack_window(self.window(number))[1].dropped

    def after_first(self) -> Window:
        """The window after the first one."""
        if len(self._windows) == 1:
            self._extend()
        return self._windows[1]

    def end_of_epoch(self) -> int:
        """Number of the first row after the epoch that the plan begins in."""
        epoch = self._windows[0].epoch
        while self._windows[-1].epoch == epoch:
            self._extend()
        return next(window.first_row for window in self._windows if window.epoch > epoch)

    def _extend(self) -> None:
        """Append the window after the last known one."""
        window = self._windows[-1]
        following = self._pack_window(window)[1]
        if following.epoch > window.epoch and any(
            (begun.epoch, begun.start, begun.first_row) == (window.epoch, 0, following.first_row)
            for begun in self._windows
        ):
            raise DataError(
                f"epoch {window.epoch}",
                "none of its samples is in a row: all are bad or too long, and were dropped. The log names the first "
                "of them; `qwen3vl data inspect` shows why, `on_bad=error` stops at the first",
            )
        self._windows.append(following)

    def _pack_window(self, window: Window) -> tuple[list[Row], Window]:
        """A window's rows, and the window after it."""
        if self._latest is not None and self._latest[0] == window:
            return self._latest[1:]
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
        out = count_sets(self._set_of(sample) for sample in new if not sizes[sample].tokens)
        epoch, start = (window.epoch + 1, 0) if is_last else (window.epoch, window.start + self._window_size)
        following = Window(epoch, start, carried, window.first_row + len(rows), merge_counts(sum, window.dropped, out))
        self._latest = window, rows, following
        return rows, following


MANIFEST = "packing.json"
_ARRAYS = ("sizes", "rows", "starts")
# All files of a folder of packed rows.
FILES = (MANIFEST, *(f"{name}.npy" for name in _ARRAYS))


class PackedRows(Sizes):
    """A folder of packed rows, and the sizes of all samples, including those that are in no row."""

    def __init__(self, folder: str | Path) -> None:
        """Open a folder of `write_packed_rows`; `DataError` if it has none, or damaged ones."""
        super().__init__()
        self.folder = Path(folder)
        try:
            manifest = read_json(self.folder / MANIFEST)
            self._sizes, self._rows, self._starts = (
                np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
            )
            self.rules, self.digest = manifest["rules"], manifest["digest"]
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise DataError(
                str(folder), f"cannot read the packed rows ({error}), expected the files that 'pack' wrote"
            ) from error
        if _digest(self._sizes, self._rows, self._starts) != self.digest:
            raise DataError(str(folder), "found arrays that differ from those that were written; pack again")

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedRows, (self.folder,)  # pickles the path, not the arrays

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> tuple[int, ...]:
        """Indices of a row's samples."""
        return tuple(self._rows[self._starts[row] : self._starts[row + 1]].tolist())

    def check(self, rules: Mapping[str, Any]) -> None:
        """Refuse a run whose rules are not those by which these rows were packed with a `ValueError`."""
        found, needed = self.rules.get("multiple"), rules.get("multiple")
        if found != needed:
            or_pad = f", or set dataset.pad_to_multiple_of={found}" if found and not found % needed else ""
            raise ValueError(
                f"{self.folder} does not fit this run, which pads samples to a multiple of {needed} (packed with "
                f"{found}). Pack again with --pad-to-multiple-of {needed}{or_pad}"
            )
        if names := [name for name in {**rules, **self.rules} if rules.get(name) != self.rules.get(name)]:
            differ = ", ".join(f"{name} {rules.get(name)} (packed with {self.rules.get(name)})" for name in names)
            raise ValueError(f"{self.folder} does not fit this run, which has {differ}. Pack again")

    def tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self._sizes[self._rows, 0].sum())

    def get(self, sample: int) -> Size:
        """Size of one sample."""
        return Size(*self._sizes[sample].tolist())


class PackedPlan:
    """Rows by their number, with the interface of `RowPlan`; random access to any row has the same cost."""

    def __init__(self, packed: PackedRows, seed: int | None) -> None:
        """Plan packed rows in an order by a seed, different in each epoch, or as on disk without one."""
        self._packed, self._order = packed, NumberedOrder(len(packed), seed)

    def row(self, number: int) -> tuple[int, ...]:
        """Indices of one row's samples."""
        epoch, place = divmod(number, len(self._packed))
        return self._packed[self._order.numbers(epoch, place, 1)[0]]

    def window(self, number: int) -> Window:
        """The epoch of a row, and the epoch's first row."""
        epoch = number // len(self._packed)
        return Window(epoch=epoch, first_row=epoch * len(self._packed))

    def dropped(self, number: int) -> SetCounts:
        """No samples: they were dropped, and reported, when the rows were packed."""
        return ()

    def end_of_epoch(self) -> int:
        """Number of rows of the first epoch."""
        return len(self._packed)


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def write_packed_rows(
    folder: Path,
    sizes: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    rules: Mapping[str, Any],
    about: Mapping[str, Any],
) -> None:
    """Write packed rows into an empty folder: int64 arrays as in the module's description, `RowDataset.rules`, and
    further information for readers of `packing.json`.
    """
    for name, array in zip(_ARRAYS, (sizes, rows, starts), strict=True):
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    digest = _digest(sizes, rows, starts)
    manifest = {"rules": dict(rules), "digest": digest, "about": dict(about)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
