"""Rows packed before training and stored on disk: the samples of each row, and the sizes of all samples.

A folder contains numpy arrays, which are memory-mapped so that all processes of a machine share them: `sizes`
[samples, 3] as in `Size`, `rows` with the concatenated samples of all rows, `starts` [rows + 1] with each row's offset
in it; and `packing.json` with the packing rules. It contains neither text nor images nor tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.packing.row_plan import NumberedOrder, SetCounts, Window
from qwen3vl_bridge.data.packing.sample_sizes import Size, Sizes
from qwen3vl_bridge.io.parsing import read_json

import numpy as np

VERSION = 1
MANIFEST = "packing.json"
_ARRAYS = ("sizes", "rows", "starts")
# All files of a folder of packed rows.
FILES = (MANIFEST, *(f"{name}.npy" for name in _ARRAYS))


class PackedRows(Sizes):
    """A folder of packed rows, and the sizes of all samples, including those that are in no row."""

    def __init__(self, folder: str | Path) -> None:
        """Open a folder written by `write`; `DataError` if it has no rows, or damaged or other versions of them."""
        super().__init__()
        self.folder = Path(folder)
        try:
            manifest = read_json(self.folder / MANIFEST)
            self._sizes, self._rows, self._starts = (
                np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
            )
            self.rules, self.digest, version = manifest["rules"], manifest["digest"], manifest["version"]
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise DataError(
                str(folder), f"cannot read the packed rows ({error}), expected the files that 'pack' wrote"
            ) from error
        if version != VERSION:
            raise DataError(str(folder), f"found version {version}, expected {VERSION}; pack again")
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


def write(
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
    manifest = {"version": VERSION, "rules": dict(rules), "digest": digest, "about": dict(about)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
