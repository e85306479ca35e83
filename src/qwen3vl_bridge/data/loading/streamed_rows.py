"""Rows of a stream that is read in parts, each sample in only one data-loading process.

Row n is row n // parts of part n % parts. A data-parallel rank takes every dp_size-th microbatch and assigns its own to
its workers in turn; so if `parts` is a multiple of ranks x workers x rows of a microbatch, all rows of a part are read
in one process. Each part has its own windows and epochs, and begins its next epoch at its own end: no rank waits for
another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.loading.row_dataset import Row, RowDataset
from qwen3vl_bridge.data.packing.row_plan import Window, counts_since
from qwen3vl_bridge.data.packing.sample_sizes import LatestSizes, Left
from qwen3vl_bridge.data.samples import Samples
from qwen3vl_bridge.data.sources.hub_streaming import StreamedDataset

from torch.utils.data import Dataset


class StreamedRows(Dataset[Row]):
    """Endless rows by number, like `RowDataset`."""

    def __init__(self, whole: RowDataset, parts: int, note: Callable[[Left], int] | None = None) -> None:
        """Divide a stream.

        Args:
            whole: rows of all of it, none of which has been read.
            parts: number of parts.
            note: counts the dropped samples of all parts, for the log (see `Sizes.note`); None to count each part
                separately.

        Raises:
            DataError: a stream with fewer files than parts, which cannot be divided further.
            ValueError: samples that are not from a stream.
        """
        file = whole.samples.file
        if not isinstance(file, StreamedDataset):
            raise ValueError(f"found samples of a {type(file).__name__}, expected those of a StreamedDataset")
        self._whole, self._parts, self._file, self._note = whole, parts, file.divided(parts), note
        self._rows: dict[int, RowDataset] = {}

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, number: int) -> Row:
        """Read and encode one row."""
        number %= self._whole.repeat or number + 1
        place, part = divmod(number, self._parts)
        rows = self._rows_of(part)
        row = rows[place]
        before = rows.plan.dropped(place - 1) if place else ()
        return row._replace(dropped=(), newly_dropped=counts_since(before, row.dropped))

    def _rows_of(self, part: int) -> RowDataset:
        if part not in self._rows:
            sizes = LatestSizes(note=self._note)
            samples = Samples(self._file.part(part, self._parts), self._whole.samples.sample_filter, sizes)
            self._rows[part] = RowDataset(samples, self._whole.settings, repeat=self._whole.repeat)
        return self._rows[part]

    def begun_at(self, begin: Window) -> StreamedRows:
        """The same rows. A position has the window of only one part, so all are read again from the start."""
        return StreamedRows(self._whole, self._parts, self._note)

    def collate_fn(self, rows: Sequence[Row]) -> PackedBatch:
        """A microbatch of rows. The name is required by Megatron-Bridge's loop.

        Raises:
            ValueError: several packed rows.
        """
        return self._whole.collate_fn(rows)

    def assignment(self) -> tuple[int, int]:
        """Like RowDataset's: rows of a stream are not assigned by cost."""
        return self._whole.assignment()

    def fingerprint(self) -> dict[str, int | str | None]:
        """Whatever must be equal for a row's number to mean the same row."""
        return {**self._whole.fingerprint(), "data": self._file.fingerprint(), "parts": self._parts}
