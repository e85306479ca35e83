"""Pack rows before training: several processes measure every sample once, and the rows are written to disk.

When rows are packed during training, each machine measures every sample, and every process packs all of them. This is
fast for thousands of samples and too slow for millions.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, count, takewhile
from pathlib import Path

from qwen3vl_bridge.core.atomic import atomic_directory, check_only_own_files, check_target
from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.data.errors import DataError, describe_lost_worker
from qwen3vl_bridge.data.loading import RowDataset, make_worker_init
from qwen3vl_bridge.data.packing import FILES, MANIFEST, PackedRows, RowPlan, Size, write_packed_rows
from qwen3vl_bridge.data.samples import Samples, Sizes, open_shared_sizes

import numpy as np
from torch.utils.data import DataLoader, Dataset

_CHUNK = 64  # samples that a process measures at a time
# Number of samples packed together: more would not fill rows better, and best-fit slows down.
_WINDOW = 2**16


@dataclass(frozen=True)
class PackingReport:
    """Statistics of packed rows."""

    samples: int  # in the source, including dropped (bad or too long) and truncated samples
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
    """Measure all samples, pack them into rows, write the rows to a folder, and return statistics.

    The folder appears only when it is complete.

    Args:
        rows: the samples and the settings of the rows, which must not be packed already.
        folder: folder to write; new, or with packed rows if `overwrite` is set.
        workers: number of processes that measure; 0 for this process.
        overwrite: replace earlier packed rows.
        progress: wraps the iterator over the numbers of samples measured in each step.
        say: called with a line of text when the leftovers of a killed process were removed.

    Raises:
        ValueError: packing is off, the rows are packed already, or the data set is streamed.
        DataError: a sample cannot be trained on and the settings do not drop it, or no sample is valid.
        CheckpointError: the destination cannot be written to.
    """
    if not rows.settings.pack or rows.settings.packed is not None:
        raise ValueError("the rows are packed already, or packing is off: set pack to True, and remove train_packing")
    check_target(folder, overwrite=overwrite, check_replaceable=_check_packing)
    rules = rows.rules()  # first, because it fails if the data are incomplete
    if rows.samples.total is None:
        raise ValueError("the data set is streamed, so its rows cannot be packed before training: turn streaming off")
    samples, total = rows.samples, rows.samples.total
    if workers:  # each sample is measured by one worker; their drop counts are logged together
        counts = open_shared_sizes(0, {"packing": secrets.token_hex(8)})
        samples = Samples(samples.source, samples.sample_filter, Sizes(), counts.count_drop)
    sizes, truncated = _measure_all(samples, total, workers, progress)
    settings, most = rows.settings, samples.sample_filter.most_patches
    capacity, multiple = settings.collator.seq_length, settings.collator.multiple
    plan = RowPlan(
        lambda sample: Size(*sizes[sample].tolist()).padded(multiple),
        # In random order, because neighboring samples often have similar sizes, which do not combine into full rows.
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
    with atomic_directory(folder, say, check_replaceable=_check_packing if overwrite else None) as place:
        write_packed_rows(place, sizes, packed, starts, rules, asdict(report))
        PackedRows(place).check(rules)
    return report


def _check_packing(folder: Path) -> None:
    """Raise CheckpointError if a folder contains anything other than packed rows."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} does not hold packed rows, so it is not replaced; remove it yourself")
    check_only_own_files(folder, FILES, "packing")


class _MeasuredChunks(Dataset[tuple[np.ndarray, int]]):
    """Dataset of chunks of consecutive samples: their sizes, [samples, 3], and how many of them were truncated."""

    def __init__(self, samples: Samples, total: int) -> None:
        self._samples, self._total = samples, total

    def __len__(self) -> int:
        return -(-self._total // _CHUNK)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        sample_filter, first = self._samples.sample_filter, number * _CHUNK
        before = sample_filter.num_truncated
        sizes = [self._samples.size(index) for index in range(first, min(first + _CHUNK, self._total))]
        return np.array(sizes, dtype=np.int64), sample_filter.num_truncated - before


def _measure_all(
    samples: Samples, total: int, workers: int, progress: Callable[[Iterable[int]], Iterable[int]]
) -> tuple[np.ndarray, int]:
    """Return the sizes of all samples, [samples, 3] (fields of `Size`), and the number of truncated samples."""
    sizes, counts = list[np.ndarray](), list[int]()
    loader = DataLoader(
        _MeasuredChunks(samples, total), batch_size=None, num_workers=workers, worker_init_fn=make_worker_init(None)
    )

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
    except RuntimeError as error:
        if lost := describe_lost_worker(error, "--workers"):
            raise ChildProcessError(lost) from None
        raise
    return np.concatenate(sizes), sum(counts)
