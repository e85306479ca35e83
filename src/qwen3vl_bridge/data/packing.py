"""Plan the rows of a run: which samples share a row. Every rank and process computes the same endless sequence of rows.

Each epoch is an order of the samples, divided into windows. The samples of a window are packed into rows together. The
samples of the emptiest row are carried over to the next window; the last window of an epoch keeps all its rows. So
every sample is in exactly one row per epoch.

A plan can begin at any `Window`. Only `BatchStream` of custom loops stores its window, to resume. A run of
Megatron-Bridge resumes from the number of consumed rows, and plans all rows from the first again.

Rows packed before training are a folder of numpy arrays. They are memory-mapped, so that all processes of a machine
share them. `sizes` [samples, 3] contains the fields of `Size`, `rows` the concatenated sample numbers of all rows, and
`starts` [rows + 1] the offset of each row in `rows`. `packing.json` contains the packing rules. The folder contains no
text, images or tokens.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, zip_longest
from math import floor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from qwen3vl_bridge.core.files import read_json
from qwen3vl_bridge.data.errors import DataError

import numpy as np
import torch


class Size(NamedTuple):
    """Space that a sample takes in a row. A sample with 0 tokens is in no row."""

    tokens: int
    patches: int
    patch_pairs: int  # sum over frames of the squared number of patches, the cost of the vision tower's attention

    def padded(self, multiple: int) -> Size:
        """Return this size with the tokens rounded up to a multiple."""
        return self._replace(tokens=-(-self.tokens // multiple) * multiple)


NOTHING = Size(0, 0, 0)


# Numbers of samples, by the index of their data set; trailing zeros may be missing.
SetCounts = tuple[int, ...]


def count_by_set(sets: Iterable[int]) -> SetCounts:
    """Return how often each data set index occurs in `sets`, by index."""
    counts = Counter(sets)
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))


def merge_counts(merge: Callable[[tuple[int, ...]], int], *counts: SetCounts) -> SetCounts:
    """Return one count per data set: the result of `merge`, such as `sum` or `max`, for the counts of the data set."""
    return tuple(map(merge, zip_longest(*counts, fillvalue=0)))


_KEPT = 2  # epochs whose order is cached: a window may extend over the end of an epoch
_SEEDS = 1_000_003  # distance between seeds, so that the epochs of two seeds differ


class Order(Protocol):
    """The order in which the samples of each epoch are read; equal in every process."""

    def sample_numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Return the sample numbers at positions `start` to `start + count - 1` of an epoch.

        The result is shorter, or empty, if the epoch ends earlier.
        """
        ...


class NumberedOrder(Order):
    """Order of the samples 0 to `num_samples` - 1: numerical, or random and different in each epoch."""

    def __init__(self, num_samples: int, seed: int | None = None) -> None:
        """Order the samples randomly if `seed` is set, otherwise numerically; raise ValueError for 0 samples."""
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}, expected at least 1")
        self._num_samples, self._seed = num_samples, seed
        self._shuffled = dict[int, torch.Tensor]()  # by epoch

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self._num_samples

    def sample_numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Return the sample numbers at positions `start` to `start + count - 1` of an epoch."""
        end = min(start + count, self._num_samples)
        if self._seed is None:
            return range(start, end)
        if epoch not in self._shuffled:
            # One generator per epoch, so that any epoch can be resumed without the previous ones.
            generator = torch.Generator().manual_seed((self._seed * _SEEDS + epoch) % 2**63)
            self._shuffled[epoch] = _to_int32(torch.randperm(self._num_samples, generator=generator))
            if len(self._shuffled) > _KEPT:
                del self._shuffled[next(iter(self._shuffled))]
        return self._shuffled[epoch][start:end].tolist()


class MixedOrder(Order):
    """Order that mixes several data sets, with a given number of samples per epoch from each data set.

    Samples are numbered one data set after the other.

    Each data set is read pass after pass: each sample once per pass, each pass in a different order. An epoch continues
    where the previous epoch stopped. So after any number of epochs, all samples of a data set have been read equally
    often, give or take one, even if an epoch reads 0.3 or 2.5 times the data set.

    Within an epoch, sample k of the n samples of a data set gets a time drawn from [k / n, (k + 1) / n), or the middle
    of that interval without a seed. Samples are sorted by time, so every part of the epoch has the same mixture.
    """

    def __init__(self, lengths: Sequence[int], taken: Sequence[Fraction], seed: int | None = None) -> None:
        """Order the samples of several data sets with these lengths.

        `taken` is the number of samples of each data set per epoch, on average if it is not an integer. Without a seed
        the order within each data set is numerical.

        Raises:
            ValueError: a data set has no samples per epoch, or the epoch is empty.
        """
        if any(number <= 0 for number in taken) or sum(map(floor, taken)) < 1:
            found = ", ".join(f"{float(number):g} of {length}" for number, length in zip(taken, lengths, strict=True))
            raise ValueError(
                f"an epoch would take {found} samples, expected more than 0 from each data set and at least 1 in all"
            )
        self._lengths, self._taken, self._seed = tuple(lengths), tuple(taken), seed
        self._firsts = [0, *accumulate(lengths)]
        seeds = [None if seed is None else seed * _SEEDS + number for number in range(len(lengths))]
        self._sets = [NumberedOrder(length, own) for length, own in zip(lengths, seeds, strict=True)]
        self._merged = dict[int, torch.Tensor]()  # by epoch

    def __len__(self) -> int:
        """Return the number of samples of the first epoch."""
        return sum(self._samples_before(1))

    def sample_numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Return the sample numbers at positions `start` to `start + count - 1` of an epoch."""
        return [
            self._firsts[number] + self._sets[number].sample_numbers(passed, place, 1)[0]
            for number, passed, place in self._positions(epoch, start, count)
        ]

    def are_first_reads(self, epoch: int, start: int, count: int) -> list[bool]:
        """Return True for each sample that is read for the first time in the run, else False.

        The list is for `count` samples of an epoch, from position `start` on.
        """
        return [passed == 0 for _, passed, _ in self._positions(epoch, start, count)]

    def _positions(self, epoch: int, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (data set, pass over it, position in the pass) for `count` samples of an epoch from `start` on."""
        begun, ended = self._samples_before(epoch), self._samples_before(epoch + 1)
        before = [0, *accumulate(end - begin for begin, end in zip(begun, ended, strict=True))]
        for drawn in self._merged_order(epoch, before)[start : start + count].tolist():
            number = bisect_right(before, drawn) - 1  # skips data sets without samples
            passed, place = divmod(begun[number] + drawn - before[number], self._lengths[number])
            yield number, passed, place

    def _samples_before(self, epoch: int) -> list[int]:
        """Return the number of samples of each data set that were read before an epoch."""
        return [floor(epoch * number) for number in self._taken]

    def _merged_order(self, epoch: int, before: Sequence[int]) -> torch.Tensor:
        """Return the order of an epoch as indices into its samples before sorting by time: [samples] int32 or int64.

        Before sorting, the data sets follow one another; `before` has the first index of each, and the total. int64 is
        used from 2**31 samples on.
        """
        if epoch not in self._merged:
            counts = [end - begin for begin, end in pairwise(before)]
            within = torch.full((before[-1],), 0.5, dtype=torch.float64)
            if self._seed is not None:
                generator = torch.Generator().manual_seed((self._seed * _SEEDS * _SEEDS + epoch - _SEEDS) % 2**63)
                within = torch.rand(before[-1], dtype=torch.float64, generator=generator)
            parts = zip(within.split(counts), counts, strict=True)
            times = torch.cat([(torch.arange(count, dtype=torch.float64) + part) / count for part, count in parts])
            self._merged[epoch] = _to_int32(times.argsort(stable=True))
            if len(self._merged) > _KEPT:
                del self._merged[next(iter(self._merged))]
        return self._merged[epoch]


def _to_int32(order: torch.Tensor) -> torch.Tensor:
    """Convert sample numbers to int32 to save memory; from 2**31 samples on, return them unchanged."""
    return order.int() if len(order) < 2**31 else order


_SHELVES, _LOOKS = 16, 32


def best_fit(
    lengths: Sequence[int], capacity: int, patches: Sequence[int] | None = None, most_patches: int | None = None
) -> list[list[int]]:
    """Pack samples into rows by best-fit decreasing. Raise ValueError if a sample does not fit into a row.

    Samples are taken in descending order of size. Each goes into the fullest row that has space for it. The returned
    rows, and the sample numbers in a row, are in ascending order.
    """
    if patches is None or most_patches is None:
        patches, most_patches = [0] * len(lengths), 1
    # The size of a sample is the larger of its fractions of a row's tokens and patches.
    share = [max(n / capacity, p / most_patches) for n, p in zip(lengths, patches, strict=True)]
    rows, room = list[list[int]](), _FreeSpace(most_patches)
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


class _FreeSpace:
    """Free space of rows, grouped by free patches so that full rows are not searched."""

    def __init__(self, most_patches: int) -> None:
        self._shelves: list[list[tuple[int, int, int]]] = [[] for _ in range(min(_SHELVES, most_patches + 1))]
        self._most = most_patches + 1

    def put(self, tokens: int, row: int, patches: int) -> None:
        if tokens:
            insort(self._shelves[patches * len(self._shelves) // self._most], (tokens, row, patches))

    def take(self, tokens: int, patches: int) -> tuple[int, int, int] | None:
        """Remove the fullest row with space for a sample, and return (free tokens, row number, free patches) of it.

        Return None if no row has enough space for `tokens` and `patches`.
        """
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
    """Position in a row plan, just before a window (samples that are packed together). A plan can resume from it."""

    epoch: int = 0
    start: int = 0  # position, in the order of the epoch, of its first sample that is not in `carried`
    carried: Row = ()  # samples from the previous window
    first_row: int = 0  # number of rows before it, over all epochs
    dropped: SetCounts = ()  # samples before it that were dropped (bad or too long), each counted once


class RowPlan:
    """Plan of which samples share a row. Access to a row packs all earlier rows first, so read rows in order."""

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
        """Plan rows of at most `capacity` tokens and `most_patches` patches.

        Args:
            size: returns the space of a sample in a row, with its padding; 0 tokens to drop the sample.
            capacity: maximum tokens of a row.
            pack: pack several samples per row; if False, each sample is a row.
            window_size: number of samples that are packed together.
            begin: window to start at; None for the first.
            most_patches: maximum patches of a row; None for no limit.
            measure: called with the numbers of the samples to measure next.
            set_of: returns the index of the data set of a sample, for counts of dropped samples.
        """
        if window_size < 1:
            raise ValueError(f"window_size is {window_size}, expected at least 1")
        self._size, self._order, self._capacity, self._most_patches = size, order, capacity, most_patches
        self._pack, self._window_size, self._measure, self._set_of = pack, window_size, measure, set_of
        self._windows = [begin or Window()]
        self._latest: tuple[Window, list[Row], Window] | None = None  # last packed, its rows, the next

    def row(self, number: int) -> Row:
        """Return the sample numbers of a row.

        Raises:
            IndexError: the row is before the first row of the plan.
            DataError: no sample of an epoch is valid, so that the epoch has no rows.
        """
        window = self.window(number)
        return self._pack_window(window)[0][number - window.first_row]

    def window(self, number: int) -> Window:
        """Return the window that contains a row."""
        if number < self._windows[0].first_row:
            raise IndexError(f"row {number} is before row {self._windows[0].first_row}, where this plan begins")
        while self._windows[-1].first_row <= number:
            self._extend()
        return self._windows[bisect_right(self._windows, number, key=lambda window: window.first_row) - 1]

    def dropped(self, number: int) -> SetCounts:
        """Return how many samples of each data set were dropped up to the end of the window that contains a row."""
        return self._pack_window(self.window(number))[1].dropped

    def second_window(self) -> Window:
        """Return the second window of the plan."""
        if len(self._windows) == 1:
            self._extend()
        return self._windows[1]

    def end_of_epoch(self) -> int:
        """Return the number of the first row after the epoch in which the plan begins."""
        epoch = self._windows[0].epoch
        while self._windows[-1].epoch == epoch:
            self._extend()
        return next(window.first_row for window in self._windows if window.epoch > epoch)

    def _extend(self) -> None:
        """Append the window after the last known window; raise DataError if an epoch has no rows."""
        window = self._windows[-1]
        following = self._pack_window(window)[1]
        if following.epoch > window.epoch and any(
            (begun.epoch, begun.start, begun.first_row) == (window.epoch, 0, following.first_row)
            for begun in self._windows
        ):
            raise DataError(
                f"epoch {window.epoch}",
                "all samples are bad or too long and were dropped, so no row is left. The log names the first of them; "
                "`qwen3vl data inspect` shows why, dataset.on_bad=error stops at the first",
            )
        self._windows.append(following)

    def _pack_window(self, window: Window) -> tuple[list[Row], Window]:
        """Pack the samples of a window into rows; return the rows, and the next window."""
        if self._latest is not None and self._latest[0] == window:
            return self._latest[1:]
        new = self._order.sample_numbers(window.epoch, window.start, self._window_size)
        is_last = len(new) < self._window_size
        if self._measure is not None:
            self._measure(new)
        sizes = {sample: self._size(sample) for sample in (*window.carried, *new)}
        # A list, not the keys of `sizes`: a mixture may have a sample several times in a window.
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
        # Count each sample once, not once per epoch. A mixture may read a data set several times per epoch, or a part.
        if isinstance(self._order, MixedOrder):
            are_new = self._order.are_first_reads(window.epoch, window.start, self._window_size)
        else:
            are_new = [window.epoch == 0] * len(new)
        left_out = (sample for sample, is_new in zip(new, are_new, strict=True) if is_new and not sizes[sample].tokens)
        out = count_by_set(map(self._set_of, left_out))
        epoch, start = (window.epoch + 1, 0) if is_last else (window.epoch, window.start + self._window_size)
        following = Window(epoch, start, carried, window.first_row + len(rows), merge_counts(sum, window.dropped, out))
        self._latest = window, rows, following
        return rows, following


MANIFEST = "packing.json"
_ARRAYS = ("sizes", "rows", "starts")
# All files of a folder of packed rows.
FILES = (MANIFEST, *(f"{name}.npy" for name in _ARRAYS))


class PackedRows:
    """A folder of packed rows, with the sizes of all samples, including samples that are in no row."""

    def __init__(self, folder: str | Path) -> None:
        """Open a folder written by `write_packed_rows`; raise DataError if files are missing or damaged."""
        self.folder = Path(folder)
        try:
            manifest = read_json(self.folder / MANIFEST)
            self._sizes, self._rows, self._starts = (
                np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
            )
            self.rules, self.digest = manifest["rules"], manifest["digest"]
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise DataError(
                str(folder),
                f"cannot read the packed rows ({error}), expected the files that `qwen3vl data pack` writes",
            ) from error
        if _digest(self._sizes, self._rows, self._starts) != self.digest:
            raise DataError(
                str(folder), "the checksum of the arrays differs from packing.json; run `qwen3vl data pack` again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedRows, (self.folder,)  # pickles the path, not the arrays

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> tuple[int, ...]:
        """Return the indices of the samples of a row."""
        return tuple(self._rows[self._starts[row] : self._starts[row + 1]].tolist())

    def check(self, rules: Mapping[str, Any]) -> None:
        """Raise ValueError if the packing rules of a run (`RowDataset.rules`) are not those that made these rows."""
        found, needed = self.rules.get("multiple"), rules.get("multiple")
        if found != needed:
            or_pad = f", or set dataset.pad_to_multiple_of={found}" if found and not found % needed else ""
            raise ValueError(
                f"{self.folder} was packed for another run: this run pads samples to a multiple of {needed} (packed "
                f"with {found}). Pack again with --pad-to-multiple-of {needed}{or_pad}"
            )
        # Packing under "error" succeeded, so no sample was left out or cut: "drop" and "truncate" give the same rows.
        strict = {name for name in ("on_long", "on_bad") if self.rules.get(name) == "error"}
        names = [name for name in {**rules, **self.rules} if rules.get(name) != self.rules.get(name)]
        if names := [name for name in names if name not in strict]:
            differ = ", ".join(f"{name} {rules.get(name)} (packed with {self.rules.get(name)})" for name in names)
            raise ValueError(f"{self.folder} was packed for another run: this run has {differ}. Pack again")

    def tokens(self) -> int:
        """Return the total number of tokens of all rows, without padding."""
        return int(self._sizes[self._rows, 0].sum())

    def size(self, sample: int) -> Size:
        """Return the size of a sample, as it was measured when the rows were packed."""
        return Size(*self._sizes[sample].tolist())


class PackedPlan:
    """Plan of rows that were packed before training, with methods like `RowPlan`. Access to any row costs the same."""

    def __init__(self, packed: PackedRows, seed: int | None) -> None:
        """Set the order of the rows: random and different in each epoch if `seed` is set, otherwise as on disk."""
        self._packed, self._order = packed, NumberedOrder(len(packed), seed)

    def row(self, number: int) -> tuple[int, ...]:
        """Return the indices of the samples of a row."""
        epoch, place = divmod(number, len(self._packed))
        return self._packed[self._order.sample_numbers(epoch, place, 1)[0]]

    def window(self, number: int) -> Window:
        """Return a `Window` with the epoch of a row, and the first row of that epoch."""
        epoch = number // len(self._packed)
        return Window(epoch=epoch, first_row=epoch * len(self._packed))

    def dropped(self, number: int) -> SetCounts:
        """Return an empty tuple, because samples were dropped and reported when the rows were packed."""
        return ()

    def end_of_epoch(self) -> int:
        """Return the number of rows of the first epoch."""
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
    """Write packed rows into an empty folder.

    Args:
        sizes, rows, starts: int64 arrays, see the module docstring.
        rules: data and settings that the packing depends on (`RowDataset.rules`).
        about: further information for readers of `packing.json`.
    """
    for name, array in zip(_ARRAYS, (sizes, rows, starts), strict=True):
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    digest = _digest(sizes, rows, starts)
    manifest = {"rules": dict(rules), "digest": digest, "about": dict(about)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
