"""Packing before training: several processes measure every sample once and write the rows to disk.

When packing during training, each machine measures every sample, and every process packs all of them. This is fast for
thousands of samples and too slow for millions.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.loading.batch_stream import ignoring
from qwen3vl_bridge.data.loading.row_dataset import RowDataset
from qwen3vl_bridge.data.packing.packed_rows import FILES, MANIFEST, PackedRows, write
from qwen3vl_bridge.data.packing.row_plan import RowPlan
from qwen3vl_bridge.data.packing.sample_sizes import LatestSizes, Size, sizes_of_job
from qwen3vl_bridge.data.samples import Samples
from qwen3vl_bridge.io.atomic import atomic_directory, check_target, refuse_others
from qwen3vl_bridge.io.files import CheckpointError

import numpy as np
from torch.utils.data import DataLoader, Dataset

_CHUNK = 64  # samples that a process measures at a time
# Number of samples packed together: more would not fill rows better, and best-fit slows down.
_WINDOW = 2**16


@dataclass(frozen=True)
class PackingReport:
    """Numbers of a packing."""

    samples: int  # in the source, with dropped (bad or too long) and truncated ones
    dropped: int
    truncated: int
    rows: int
    fill: float  # fraction of real tokens in the rows
    patch_fill: float | None  # patches divided by `max_patches` of all rows; None without a limit
    tokens: int
    patches: int


def pack(
    rows: RowDataset,
    folder: Path,
    *,
    workers: int = 0,
    overwrite: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    say: Callable[[str], None] = lambda _: None,
) -> PackingReport:
    """Measure all samples, pack them into rows, and write the rows to a folder, which appears only when complete.

    Args:
        rows: the samples and the settings of rows, without a packing.
        folder: destination.
        workers: processes that measure; 0 for this process.
        overwrite: whether to replace an earlier packing.
        progress: wraps the numbers of samples measured in each step.
        say: called with a line of text when the leftovers of a killed process were removed.

    Raises:
        ValueError: rows that cannot be packed.
        DataError: a sample that cannot be trained on, if that is an error; no valid samples.
        CheckpointError: the destination cannot be written to.
    """
    if not rows.settings.pack or rows.settings.packed is not None:
        raise ValueError("found rows that are packed already, or with packing off; expected rows to pack")
    check_target(folder, overwrite=overwrite, replaceable=_check_packing)
    rules = rows.rules()  # first: fails if the data are incomplete
    if rows.samples.total is None:
        raise ValueError("found a stream, expected samples by number: a stream is packed as it is read")
    samples, total = rows.samples, rows.samples.total
    if workers:  # each sample is measured once, by one of them; their counts are logged together
        counts = sizes_of_job(0, {"packing": secrets.token_hex(8)})
        samples = Samples(samples.file, samples.sample_filter, LatestSizes(note=counts.note))
    sizes, dropped, truncated = _measured(samples, total, workers, progress)
    packed, starts = _packed(rows, sizes)
    _prove(rows, sizes, packed, starts)
    num_rows, capacity = len(starts) - 1, rows.settings.collator.seq_length
    tokens, patches, _ = sizes[packed].sum(0).tolist()
    most = rows.samples.sample_filter.most_patches
    report = PackingReport(
        samples=len(sizes),
        dropped=dropped,
        truncated=truncated,
        rows=num_rows,
        fill=tokens / (num_rows * capacity),
        patch_fill=None if most is None else patches / (num_rows * most),
        tokens=tokens,
        patches=patches,
    )
    with atomic_directory(folder, say, replace=_check_packing if overwrite else None) as place:
        write(place, sizes, packed, starts, rules, asdict(report))
        PackedRows(place).check(rules)
    return report


def _check_packing(folder: Path) -> None:
    """Refuse to replace anything other than an earlier packing."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} does not hold packed rows, so it is not replaced; remove it yourself")
    refuse_others(folder, FILES, "packing")


class _Measured(Dataset[tuple[np.ndarray, int, int]]):
    """Sizes of consecutive samples, and how many of them were dropped and truncated."""

    def __init__(self, samples: Samples, total: int) -> None:
        self._samples, self._total = samples, total

    def __len__(self) -> int:
        return -(-self._total // _CHUNK)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int, int]:
        sample_filter, first = self._samples.sample_filter, number * _CHUNK
        dropped, truncated = sample_filter.num_dropped, sample_filter.num_truncated
        sizes = [self._samples.size(index) for index in range(first, min(first + _CHUNK, self._total))]
        return (
            np.array(sizes, dtype=np.int64),
            sample_filter.num_dropped - dropped,
            sample_filter.num_truncated - truncated,
        )


def _measured(
    samples: Samples, total: int, workers: int, progress: Callable[[Iterable[int]], Iterable[int]]
) -> tuple[np.ndarray, int, int]:
    """[samples, 3] sizes, number of dropped samples, and number of truncated ones."""
    chunks = _Measured(samples, total)
    sizes, dropped, truncated = np.empty((total, len(Size._fields)), np.int64), 0, 0

    def steps() -> Iterator[int]:
        nonlocal dropped, truncated
        first = 0
        loader = DataLoader(chunks, batch_size=None, num_workers=workers, worker_init_fn=ignoring(None))
        for part, fewer, shorter in loader:
            part = np.asarray(part)
            sizes[first : first + len(part)] = part
            first, dropped, truncated = first + len(part), dropped + fewer, truncated + shorter
            yield len(part)

    try:
        for _ in progress(steps()):
            pass
    except DataError as error:
        raise error.without_traceback() from None
    return sizes, dropped, truncated


def _packed(rows: RowDataset, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The samples of all rows, concatenated, and each row's offset."""
    settings, multiple = rows.settings, rows.settings.collator.multiple
    # In random order, because neighbouring samples are often similar, and similar samples do not fill each other's
    # gaps.
    order = rows.order(settings.seed or 0)
    plan = RowPlan(
        lambda sample: Size(*sizes[sample].tolist()).padded(multiple),
        order,
        capacity=settings.collator.seq_length,
        window_size=_WINDOW,
        most_patches=rows.samples.sample_filter.most_patches,
        report=False,
    )
    # In order, so that each window is packed once.
    packed = [plan.row(number) for number in takewhile(lambda row: plan.window(row).epoch == 0, count())]
    starts = np.cumsum([0, *map(len, packed)], dtype=np.int64)
    return np.concatenate([np.array(row, dtype=np.int64) for row in packed]), starts


def _prove(rows: RowDataset, sizes: np.ndarray, samples: np.ndarray, starts: np.ndarray) -> None:
    """Check that every sample is in rows as often as an epoch reads it, and that no row exceeds its limits."""
    epoch = np.sort(np.array(rows.order(rows.settings.seed or 0).numbers(0, 0, sys.maxsize), dtype=np.int64))
    kept = epoch[sizes[epoch, 0] > 0]
    collator, most = rows.settings.collator, rows.samples.sample_filter.most_patches
    padded = -(-sizes[samples, 0] // collator.multiple) * collator.multiple
    longest = np.add.reduceat(padded, starts[:-1]).max()
    largest = np.add.reduceat(sizes[samples, 1], starts[:-1]).max()
    if (
        not np.array_equal(np.sort(samples), kept)
        or longest > collator.seq_length
        or (most is not None and largest > most)
    ):
        raise AssertionError(
            f"{len(samples)} samples in rows of up to {longest} tokens and {largest} patches, expected {len(kept)} "
            f"in rows of at most {collator.seq_length} and {most}"
        )
