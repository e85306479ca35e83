"""Rows that were packed before training and lie on disk: which samples are in which row, and how large all of them are.

What lives here: the files, and the plan that reads rows from them. What may not: making them
(`data/offline_packing.py`).

A folder of numpy's arrays, read by mapping them into memory, so that all processes of a machine share them: `sizes`
[samples, 3] as in `Size`, `rows` with the samples of one row after the other, `starts` [rows + 1] of each row in it;
and `packing.json` with the rules they were packed by. Text, pictures and tokens stay where they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.packing.row_plan import Window
from qwen3vl_bridge.data.packing.sample_order import NumberedOrder
from qwen3vl_bridge.data.packing.sample_sizes import OwnNotes, Size, Sizes
from qwen3vl_bridge.data.packing.set_counts import SetCounts
from qwen3vl_bridge.data.sources.fingerprints import differences
from qwen3vl_bridge.files.parsing import read_json

import numpy as np

VERSION = 1
MANIFEST = "packing.json"
_ARRAYS = ("sizes", "rows", "starts")
# Rules, and the names that they have as options of the command `pack` and as settings of a run's data.
_OPTIONS = {"seq_length": "seq_length", "most_patches": "max_patches", "on_long": "on_long", "on_bad": "on_bad"}
# All that a packing has.
FILES = (MANIFEST, *(f"{name}.npy" for name in _ARRAYS))


class PackedRows:
    """A folder of packed rows."""

    def __init__(self, folder: str | Path) -> None:
        """Open a folder.

        Args:
            folder: as `write` made it.

        Raises:
            DataError: there is none, or one that is damaged or of another version.
        """
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
            raise DataError(str(folder), f"found version {version}, expected {VERSION}; pack once more")
        if _digest(self._sizes, self._rows, self._starts) != self.digest:
            raise DataError(str(folder), "found arrays that differ from those that were written; pack once more")

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedRows, (self.folder,)  # to another process, not what is in the files

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> tuple[int, ...]:
        """Samples of a row."""
        return tuple(self._rows[self._starts[row] : self._starts[row + 1]].tolist())

    def check(self, rules: Mapping[str, Any]) -> None:
        """Refuse to be used with other rules than these rows were packed by.

        Raises:
            ValueError: they differ.
        """
        found, needed = self.rules.get("multiple"), rules.get("multiple")
        if found != needed:
            or_pad = f", or set dataset.pad_to_multiple_of to {found}" if found and not found % needed else ""
            raise ValueError(
                f"{self.folder} was packed by other rules: found conversations padded to multiples of {found}, "
                f"expected {needed}. Pack once more with --pad-to-multiple-of {needed}{or_pad}"
            )
        if differ := differences(rules, self.rules):
            raise ValueError(f"{self.folder} was packed by other rules: found {differ}. {_remedy(rules, self.rules)}")

    def sizes(self) -> Sizes:
        """Of all samples, also of those in no row."""
        return _StoredSizes(self)

    def size(self, sample: int) -> Size:
        """Of one sample."""
        return Size(*self._sizes[sample].tolist())

    def plan(self, seed: int | None) -> PackedPlan:
        """The rows, epoch after epoch, at random under a seed."""
        return PackedPlan(self, seed)


class _StoredSizes(OwnNotes, Sizes):
    def __init__(self, packed: PackedRows) -> None:
        super().__init__()
        self._packed = packed

    def get(self, sample: int) -> Size:
        return self._packed.size(sample)

    def keep(self, sample: int, size: Size) -> None:
        raise AssertionError(f"sample {sample} has its size {self.get(sample)} already, found {size}")


class PackedPlan:
    """Rows by their number, as `RowPlan` gives them; any row is as near as any other."""

    def __init__(self, packed: PackedRows, seed: int | None) -> None:
        """Plan packed rows.

        Args:
            packed: the rows.
            seed: of their order, anew each epoch; None for the order on disk.
        """
        self._packed, self._order = packed, NumberedOrder(len(packed), seed)

    def row(self, number: int) -> tuple[int, ...]:
        """Samples of one row."""
        epoch, place = divmod(number, len(self._packed))
        return self._packed[self._order.numbers(epoch, place, 1)[0]]

    def window(self, number: int) -> Window:
        """The epoch that a row is of."""
        epoch = number // len(self._packed)
        return Window(epoch=epoch, first_row=epoch * len(self._packed))

    def dropped(self, number: int) -> SetCounts:
        """Nothing: what was left out was when the rows were packed, which said so."""
        return ()

    def end_of_epoch(self) -> int:
        """Number of rows of the first epoch."""
        return len(self._packed)


def _remedy(run: Mapping[str, Any], packing: Mapping[str, Any]) -> str:
    """What to do about rules that differ: options to pack with, or settings that these rows were packed by."""
    other = [(rule, name) for rule, name in _OPTIONS.items() if run.get(rule) != packing.get(rule)]
    options = [f"--{name.replace('_', '-')}" for _, name in other]
    wanted = [
        f"without {option}" if (value := run.get(rule)) is None else f"with {option} {value}"
        for option, (rule, _) in zip(options, other, strict=True)
    ]
    settings = " ".join(
        f"dataset.{name}={'null' if (value := packing.get(rule)) is None else value}" for rule, name in other
    )
    return f"Pack once more {' and '.join(wanted)}, or set {settings}" if other else "Pack once more"


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
    """Write packed rows into an empty folder.

    Args:
        folder: it.
        sizes: [samples, 3] int64, as `Size`.
        rows: [samples in rows] int64, the samples of each row, row after row.
        starts: [rows + 1] int64, where each row begins in `rows`.
        rules: as `RowDataset.rules` has them.
        about: what people may want to know.
    """
    for name, array in zip(_ARRAYS, (sizes, rows, starts), strict=True):
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    digest = _digest(sizes, rows, starts)
    manifest = {"version": VERSION, "rules": dict(rules), "digest": digest, "about": dict(about)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
