"""Compute how full packed rows are in tokens and patches, and how long ranks wait for each other.

    OMP_NUM_THREADS=1 python -m benchmarks.packing
    OMP_NUM_THREADS=1 python -m benchmarks.packing --samples 5000 --csv /tmp/packing.csv

Sample sizes are random, from the mix in `KINDS`: text, one image, several images, and video, as in instruction data.
Image sizes are rounded like in Qwen3-VL's processor; four patches are a token. No data are read.

- fill: the fraction of tokens in rows that are not padding, and of the patch limit if there is one. "one a row" pads
  each sample to a row. "as they come" fills each row until the next sample does not fit. "best fit" is what training
  does, in windows of 512 samples. "before training" is what `qwen3vl data pack` writes. Megatron-Bridge packs by tokens
  only. "least_patches" is the 5th percentile of patches in a row divided by their mean.
- waiting: global batches of 256 rows on 64 data-parallel ranks, with the costs of two models. "tokens" is the longest
  time divided by the mean, if ranks synchronize at the end of a step, and if they synchronize in every microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from qwen3vl_bridge.config.flops import tower_costs
from qwen3vl_bridge.data.loading import assign_rows
from qwen3vl_bridge.data.packing import NumberedOrder, RowPlan, Size
from qwen3vl_bridge.models.qwen3_vl.presets import hf_config

import numpy as np
from megatron.bridge.data.packing.algorithms import first_fit_decreasing

from benchmarks import measurement

_COLUMNS = ("row", "most_patches", "what", "how", "tokens", "patches", "least_patches", "samples_per_s")
_PATCH, _MERGE = 16, 2
_RANKS, _TURNS = 64, 4
# Kind -> share of samples, (median, spread of the logarithm) of the number of text tokens, range of the number of
# images, most frames of a video.
KINDS = {
    "text": (0.30, (350, 0.9), (0, 0), 0),
    "one picture": (0.45, (120, 0.8), (1, 1), 0),
    "two to five pictures": (0.15, (250, 0.8), (2, 5), 0),
    "video of 8 to 64 frames": (0.10, (100, 0.7), (0, 0), 64),
}
# (share of images, range of their height and width in pixels).
PICTURES = ((0.60, (336, 640)), (0.25, (600, 1100)), (0.15, (1000, 1700)))

Rows = list[tuple[int, ...]]


class Sample(NamedTuple):
    """Number of text tokens of a sample, and (rows, columns) in patches of each image or pair of frames."""

    text: int
    frames: tuple[tuple[int, int], ...]

    @property
    def patches(self) -> list[int]:
        """Return the number of patches of each frame."""
        return [rows * columns for rows, columns in self.frames]

    @property
    def size(self) -> Size:
        """Return the numbers of tokens, patches and patch pairs that the sample takes in a row."""
        patches = self.patches
        return Size(self.text + sum(patches) // _MERGE**2, sum(patches), sum(n**2 for n in patches))


def make_samples(count: int, seed: int = 0) -> list[Sample]:
    """Return random samples from the mix in `KINDS`."""
    random, shares = np.random.default_rng(seed), [share for share, *_ in KINDS.values()]
    return [_sample(random, list(KINDS.values())[kind]) for kind in random.choice(len(KINDS), count, p=shares)]


def _sample(random: np.random.Generator, kind: tuple) -> Sample:
    _, (median, spread), pictures, most_frames = kind
    text = int(np.clip(random.lognormal(np.log(median), spread), 8, 4000))
    frames = [_picture(random) for _ in range(random.integers(pictures[0], pictures[1] + 1))]
    if most_frames:
        # The vision tower combines two frames, and the text gives the time of each pair before it.
        times = int(random.integers(4, most_frames // 2 + 1))
        frames, text = [_grid(*random.choice([(224, 224), (360, 640)]))] * times, text + 8 * times
    return Sample(text + 2 * len(frames), tuple(frames))


def _picture(random: np.random.Generator) -> tuple[int, int]:
    kind = random.choice(len(PICTURES), p=[share for share, _ in PICTURES])
    return _grid(*random.integers(*PICTURES[kind][1], 2, endpoint=True))


def _grid(height: int, width: int) -> tuple[int, int]:
    step = _PATCH * _MERGE
    rows, columns = (_MERGE * max(round(side / step), 1) for side in (height, width))
    return rows, columns


def as_they_come(sizes: Sequence[Size], capacity: int) -> Rows:
    """Pack samples in order: fill each row until the next sample does not fit."""
    rows, room = list[list[int]](), 0
    for sample, size in enumerate(sizes):
        if size.tokens > room:
            rows.append([])
            room = capacity
        rows[-1].append(sample)
        room -= size.tokens
    return [tuple(row) for row in rows]


def of_megatron_bridge(sizes: Sequence[Size], capacity: int) -> Rows:
    """Pack samples with Megatron-Bridge's `first_fit_decreasing`, which returns rows of lengths."""
    by_length: dict[int, list[int]] = {}
    for sample, size in enumerate(sizes):
        by_length.setdefault(size.tokens, []).append(sample)
    rows = first_fit_decreasing([size.tokens for size in sizes], capacity)
    return [tuple(by_length[length].pop() for length in row) for row in rows]


def planned(sizes: Sequence[Size], capacity: int, most_patches: int | None, window: int) -> Rows:
    """Pack samples with `RowPlan`, as training and `qwen3vl data pack` do."""
    plan = RowPlan(
        sizes.__getitem__,
        NumberedOrder(len(sizes), seed=0),
        capacity=capacity,
        window_size=window,
        most_patches=most_patches,
    )
    return [plan.row(number) for number in range(plan.end_of_epoch())]


def measure(sizes: list[Size], capacity: int) -> Iterator[list]:
    """Yield rows of the CSV file for packed rows of `capacity` tokens."""
    sizes = [size for size in sizes if size.tokens <= capacity]
    mean = sum(size.patches for size in sizes) / (sum(size.tokens for size in sizes) / capacity)
    tight = round(1.15 * mean)
    fitting = [size for size in sizes if size.patches <= tight]
    ways: list[tuple[str, list[Size], int | None, Callable[[], Rows]]] = [
        ("one a row", sizes, None, lambda: [(sample,) for sample in range(len(sizes))]),
        ("as they come", sizes, None, lambda: as_they_come(sizes, capacity)),
        ("Megatron-Bridge, first fit decreasing", sizes, None, lambda: of_megatron_bridge(sizes, capacity)),
        ("best fit", sizes, None, lambda: planned(sizes, capacity, None, 512)),
        ("before training", sizes, None, lambda: planned(sizes, capacity, None, 2**16)),
        ("best fit", fitting, tight, lambda: planned(fitting, capacity, tight, 512)),
        ("before training", fitting, tight, lambda: planned(fitting, capacity, tight, 2**16)),
    ]
    for options, used, most, make in ways:
        started = time.perf_counter()
        rows = make()
        seconds = time.perf_counter() - started
        tokens = sum(size.tokens for size in used) / (capacity * len(rows))
        patches = np.array([sum(used[sample].patches for sample in row) for row in rows])
        largest = patches.max() if most is None else most
        few = np.percentile(patches, 5) / patches.mean()
        yield [capacity, most or "", "fill", options, f"{tokens:.4f}", f"{patches.mean() / largest:.3f}", f"{few:.2f}",
               round(len(used) / seconds)]  # fmt: skip
        if (options, most) == ("best fit", tight):
            yield from _waiting(capacity, tight, used, rows)


def imbalance(costs: Sequence[float], order: Sequence[int], ranks: int) -> tuple[float, float]:
    """Return the longest time of a rank divided by the mean time, for two cases.

    In the first case ranks synchronize once per step, in the second in each microbatch.
    """
    turns = [[costs[row] for row in order[turn : turn + ranks]] for turn in range(0, len(order), ranks)]
    mean = sum(costs) / ranks
    return max(map(sum, zip(*turns, strict=True))) / mean, sum(map(max, turns)) / mean


def _waiting(capacity: int, most: int, sizes: list[Size], rows: Rows) -> Iterator[list]:
    batch = _RANKS * _TURNS
    for model in ("8B", "30B-A3B"):
        costs = tower_costs(hf_config(model).to_dict())
        each = [sum(costs.count_flops(**sizes[sample]._asdict()) for sample in row) for row in rows]
        batches = [each[first : first + batch] for first in range(0, len(each) - batch + 1, batch)]
        for options in ("as they come", "assigned"):
            orders = [range(batch) if options == "as they come" else assign_rows(one, _RANKS) for one in batches]
            waits = [imbalance(one, order, _RANKS) for one, order in zip(batches, orders, strict=True)]
            if waits:
                step, turn = np.mean(waits, 0)
                yield [capacity, most, f"waiting, {model}, step", options, f"{step:.3f}", "", "", ""]
                yield [capacity, most, f"waiting, {model}, microbatch", options, f"{turn:.3f}", "", "", ""]


def main() -> None:
    """Pack samples into rows of several lengths, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "packing.csv")
    parser.add_argument("--samples", type=int, default=50_000, help="default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 16384, 32768, 131072], help="tokens of a row")
    args = parser.parse_args()
    sizes = [sample.size for sample in make_samples(args.samples)]
    tokens, patches = ([getattr(size, name) for size in sizes] for name in ("tokens", "patches"))
    print(
        f"{len(sizes)} samples: tokens mean {np.mean(tokens):.0f}, median {np.median(tokens):.0f}, "
        f"most {max(tokens)}; patches mean {np.mean(patches):.0f}, most {max(patches)}"
    )
    lines = [line for capacity in args.rows for line in measure(sizes, capacity)]
    for line in lines:
        print(*line, sep="\t")
    measurement.append(args.csv, [{"samples": len(sizes), **dict(zip(_COLUMNS, line, strict=True))} for line in lines])


if __name__ == "__main__":
    main()
