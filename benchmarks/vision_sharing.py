"""Compute how evenly context-parallel ranks share the encoding of images, and the cost of sending DeepStack features.

    OMP_NUM_THREADS=1 python -m benchmarks.vision_sharing
    OMP_NUM_THREADS=1 python -m benchmarks.vision_sharing --samples 5000 --rows 8192 --csv /tmp/sharing.csv

Rows are packed as in training from the mix of `packing.py`: best fit, windows of 512 samples. Costs are computed
(`qwen3vl_bridge/config/flops.py`), not measured.

- balance: the largest cost of a rank, divided by the mean, and by the least possible value. Frames are not divided, so
  this is the larger of the mean and the costliest frame. "by cost" is our assignment. "by tokens" assigns frames in the
  same way by their tokens. "by number" is Megatron-Bridge's split into equally many adjacent frames for each rank.
  Without sharing every rank encodes all frames.
- host: milliseconds of `assign_vision` and `TokenBatch.local` for a row, with pixels copied in bfloat16, and of
  collating it.
- features: bytes that DeepStack features add to the hidden states that pipeline stages send for a row, if no layer that
  uses them is on the first stage; and the FLOPs of encoding the images on the second stage instead. bfloat16; a
  backward pass sends as many bytes again and computes twice as many FLOPs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.config.flops import tower_costs
from qwen3vl_bridge.core.vision_sharding import VisionWork, assign_frames, assign_vision
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.models.qwen3_vl.model import DeepStackStage
from qwen3vl_bridge.models.qwen3_vl.presets import config_dict
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import VISION_ROWS, parameter_count

import numpy as np
import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import qwen3vl_cp_split

from benchmarks import host, measurement, packing

_COLUMNS = ("row", "model", "ranks", "what", "how", "mean", "median", "worst", "within 5 %")
_TOWERS, _MODELS, _RANKS = ("8B", "30B-A3B"), ("8B", "30B-A3B", "235B-A22B"), (2, 4, 8)
_BYTES, _PER_TOKEN, _VALUES = 2, 4, 1536

Ways = dict[str, Callable[[Sequence[int], VisionWork, int], list[list[int]]]]


@functools.cache
def work_of(model: str) -> VisionWork:
    """Return the cost of frames in the vision tower of a released model."""
    costs = tower_costs(config_dict(model))
    return VisionWork(costs.patch, costs.patch_pair, _PER_TOKEN)


@functools.cache
def _numbers(frames: int, ranks: int) -> list[int]:
    """Return the number of frames that Megatron-Bridge assigns to each rank."""
    grids = torch.tensor([[1, 2, 2]]).repeat(frames, 1)
    return qwen3vl_cp_split(ranks, torch.zeros(4 * frames, 1), grids)[2]


def by_number(patches: Sequence[int], work: VisionWork, ranks: int) -> list[list[int]]:
    """Assign equally many adjacent frames to each rank, as Megatron-Bridge does; return the frames of each rank."""
    frames = iter(range(len(patches)))
    return [list(itertools.islice(frames, number)) for number in _numbers(len(patches), ranks)]


WAYS: Ways = {
    "by cost": lambda patches, work, ranks: assign_frames([work.cost(n) for n in patches], ranks),
    "by tokens": lambda patches, work, ranks: assign_frames(patches, ranks),
    "by number": by_number,
}


def balance(rows: list[list[int]], capacity: int) -> Iterator[list]:
    """Yield lines of the CSV file about balance. Each row is given by the numbers of patches of its frames."""
    for model, ranks in itertools.product(_TOWERS, _RANKS):
        work = work_of(model)
        costs = [[work.cost(n) for n in patches] for patches in rows]
        mean = np.array([sum(each) / ranks for each in costs])
        least = np.maximum(mean, [max(each) for each in costs])
        yield [capacity, model, ranks, "least over mean", "", *_figures(least / mean)]
        for options, assignment in WAYS.items():
            shares = [assignment(patches, work, ranks) for patches in rows]
            most = np.array(
                [max(sum(each[n] for n in share) for share in s) for each, s in zip(costs, shares, strict=True)]
            )
            yield [capacity, model, ranks, "over mean", options, *_figures(most / mean)]
            yield [capacity, model, ranks, "over least", options, *_figures(most / least)]


def _figures(ratios: np.ndarray) -> list[str]:
    return [
        *(f"{value:.3f}" for value in (ratios.mean(), np.median(ratios), ratios.max())),
        f"{(ratios <= 1.05).mean():.3f}",
    ]


def encoded(samples: list[packing.Sample]) -> list[EncodedSample]:
    """Return samples as an encoder returns them, with each pair of frames as an image."""
    found = []
    for sample in samples:
        tokens = sample.size.tokens
        ids = torch.full((tokens,), 7)
        ids[: sum(sample.patches) // _PER_TOKEN] = host._IMAGE
        pixels = torch.full((sum(sample.patches), _VALUES), 0.5, dtype=torch.bfloat16) if sample.frames else None
        grids = torch.tensor([(1, *grid) for grid in sample.frames]) if sample.frames else None
        found.append(EncodedSample(ids, ids.roll(-1), torch.ones(tokens), pixels, grids, "a sample"))
    return found


def on_host(rows: list[list[packing.Sample]], capacity: int, rounds: int) -> Iterator[list]:
    """Yield lines of the CSV file: milliseconds of a row on the host, and MB of its pixels in total and on a rank."""
    work, taken, whole, kept = work_of("8B"), dict[str, list[float]](), list[float](), list[float]()
    collator = host.collator_of(capacity + 8 * max(map(len, rows)), torch.bfloat16)
    for row in rows:
        samples = encoded(row)
        batch = collator.collate_packed(samples)
        vision = batch.vision
        assert vision is not None
        ways: dict[str, Callable[[], object]] = {
            "collate": functools.partial(collator.collate_packed, samples),
            "local, 1 rank": batch.local,
            "local, 4 ranks, all encode all": functools.partial(batch.local, 4, 1),
            "local, 4 ranks, shared": functools.partial(batch.local, 4, 1, vision_work=work),
            "of it, assigning": functools.partial(assign_frames, [work.cost(n) for n in vision.lengths], 4),
        }
        for way, seconds in measurement.median_seconds(ways, rounds, least=0.03).items():
            taken.setdefault(way, []).append(1e3 * seconds)
        whole.append(vision.pixel_values.nbytes / 1e6)
        assignment = assign_vision(vision, work, 4)
        inputs = [assignment.select(vision, rank) for rank in range(4)]
        kept += [0.0 if one is None else one.pixel_values.nbytes / 1e6 for one in inputs]
        del batch, vision, samples, ways, inputs
    for what, ways in (("host ms", taken), ("pixels MB", {"of the row": whole, "of a rank of 4": kept})):
        for way, values in ways.items():
            figures = [f"{value:.3f}" for value in (np.mean(values), np.median(values), max(values))]
            yield [capacity, "8B", "", what, way, *figures, ""]


def features(rows: list[list[int]], capacity: int) -> Iterator[list]:
    """Yield lines of the CSV file: means over rows of the MB that stages send, and of the FLOPs of a second tower."""
    patches, pairs = np.mean([sum(row) for row in rows]), np.mean([sum(n**2 for n in row) for row in rows])
    for model in _MODELS:
        costs, dimensions = tower_costs(config_dict(model)), dimensions_of(config_dict(model))
        width, taps = dimensions["hidden"], len(dimensions.indices["deepstack_mergers"])
        hidden = _BYTES * width * capacity
        added = _BYTES * width * taps * patches / _PER_TOKEN
        _check_travel(taps)
        again = costs.patch * patches + costs.patch_pair * pairs
        weights = parameter_count(VISION_ROWS, dimensions)
        for what, value in (
            ("hidden states, MB", hidden / 1e6),
            ("features, MB", added / 1e6),
            ("second tower, TFLOP forward", again / 1e12),
            ("second tower, FLOP a byte", again / added),
            ("second tower, M parameters", weights / 1e6),
        ):
            yield [capacity, model, "", "features travel", what, f"{value:.1f}", "", "", ""]


def _check_travel(taps: int) -> None:
    """Check that a pipeline stage without layers sends the number of elements that `features` computes."""
    hidden, own = torch.zeros(12, 1, 8), torch.zeros(taps, 5, 8)
    assert (
        DeepStackStage.from_layers(taps, first_layer=0, layers=0).pack(hidden, own).numel()
        == hidden.numel() + taps * 5 * 8
    )


def main() -> None:
    """Compute and measure all results, print them and append them to the CSV file."""
    parser = measurement.parser(__doc__, "vision_sharing.csv", rounds=7)
    parser.add_argument("--samples", type=int, default=50_000, help="default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 32768, 131072], help="tokens of a row")
    parser.add_argument("--timed", type=int, default=3, help="rows of each length to time (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = list[list]()
    for capacity in args.rows:
        samples = [sample for sample in packing.make_samples(args.samples) if sample.size.tokens <= capacity]
        packed = packing.planned([sample.size for sample in samples], capacity, None, 512)
        rows = [[n for sample in row for n in samples[sample].patches] for row in packed]
        frames = [len(row) for row in rows]
        print(f"{capacity}: {len(rows)} rows, {np.mean(frames):.0f} frames a row; without any: {frames.count(0)}")
        with_frames = [row for row in rows if row]
        made = [*balance(with_frames, capacity), *features(rows, capacity)]
        timed = [[samples[number] for number in row] for row, frames in zip(packed, rows, strict=True) if frames]
        made += on_host(timed[:: max(len(timed) // args.timed, 1)][: args.timed], capacity, args.rounds)
        for line in made:
            print(*line, sep="\t")
        lines += [
            {"samples": args.samples, "rows": len(rows), **dict(zip(_COLUMNS, line, strict=True))} for line in made
        ]
    measurement.append(args.csv, lines)


if __name__ == "__main__":
    main()
