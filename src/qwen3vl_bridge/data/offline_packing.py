"""Packing before training: several processes measure every sample once and write the rows to disk.

When packing during training, each machine measures every sample, and every process packs all of them. This is fast for
thousands of samples and too slow for millions.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, count, takewhile
from pathlib import Path

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.packing.row_plan import FILES, MANIFEST, PackedRows, RowPlan, write_packed_rows
from qwen3vl_bridge.data.packing.sample_sizes import Size, Sizes, sizes_of_job
from qwen3vl_bridge.data.row_loading import RowDataset, ignoring
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
        samples = Samples(samples.file, samples.sample_filter, Sizes(), counts.note)
    sizes, truncated = _measured(samples, total, workers, progress)
    settings, most = rows.settings, samples.sample_filter.most_patches
    capacity, multiple = settings.collator.seq_length, settings.collator.multiple
    plan = RowPlan(
        lambda sample: Size(*sizes[sample].tolist()).padded(multiple),
        # In random order, because neighbouring samples are often similar, and similar samples do not fill each other's
        # gaps.
        rows.order(settings.seed or 0),
        capacity=capacity,
        window_size=_WINDOW,
        most_patches=most,
    )
    # In order, so that each window is packed once.
    planned = [plan.row(number) for number in takewhile(lambda row: plan.window(row).epoch == 0, count())]
    num_rows, starts = len(planned), np.cumsum([0, *map(len, planned)], dtype=np.int64)
    packed = np.fromiter(chain.from_iterable(planned), np.int64)
    tokens, patches, _ = sizes[packed].sum(0).tolist()
    report = PackingReport(
        samples=len(sizes),
        dropped=int((sizes[:, 0] == 0).sum()),
        truncated=truncated,
        rows=num_rows,
        fill=tokens / (num_rows * capacity),
        patch_fill=None if most is None else patches / (num_rows * most),
        tokens=tokens,
        patches=patches,
    )
    with atomic_directory(folder, say, replace=_check_packing if overwrite else None) as place:
        write_packed_rows(place, sizes, packed, starts, rules, asdict(report))
        PackedRows(place).check(rules)
    return report


def _check_packing(folder: Path) -> None:
    """Refuse to replace anything other than an earlier packing."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} does not hold packed rows, so it is not replaced; remove it yourself")
    refuse_others(folder, FILES, "packing")


class _Measured(Dataset[tuple[np.ndarray, int]]):
    """Sizes of consecutive samples, and how many of them were truncated."""

    def __init__(self, samples: Samples, total: int) -> None:
        self._samples, self._total = samples, total

    def __len__(self) -> int:
        return -(-self._total // _CHUNK)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        sample_filter, first = self._samples.sample_filter, number * _CHUNK
        before = sample_filter.num_truncated
        sizes = [self._samples.size(index) for index in range(first, min(first + _CHUNK, self._total))]
        return np.array(sizes, dtype=np.int64), sample_filter.num_truncated - before


def _measured(
    samples: Samples, total: int, workers: int, progress: Callable[[Iterable[int]], Iterable[int]]
) -> tuple[np.ndarray, int]:
    """[samples, 3] sizes, and the number of truncated samples."""
    sizes, counts = list[np.ndarray](), list[int]()
    loader = DataLoader(_Measured(samples, total), batch_size=None, num_workers=workers, worker_init_fn=ignoring(None))

    def steps() -> Iterator[int]:
        for part, truncated in loader:
            sizes.append(np.asarray(part))
            counts.append(truncated)
            yield len(part)

    try:
        for _ in progress(steps()):
            pass
    except DataError as error:
        raise error.without_traceback() from None
    return np.concatenate(sizes), sum(counts)
