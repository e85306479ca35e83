"""What a step takes with vision on ranks of its own, beside a tower on the language model's: simulated, not measured.

    OMP_NUM_THREADS=1 python benchmarks/dist_train.py
    OMP_NUM_THREADS=1 python benchmarks/dist_train.py --models 8B --mixes published --csv /tmp/dist_train.csv

Times of passes are the planner's (`planning/speed/stage_times.py`): operations at 45 % of an H100's peak, links at half
their rate, nothing overlapping within a replica. The steps are played through megatron-core's schedule
(`one_f_one_b.py`), each row with its own pictures, in rows that training makes of the mix of `packing.py` (best fit,
`max_patches` 1.15 times the mean), dealt out to replicas by cost. A step is over when the slowest replica is, and has
gradients and weights, as far as work does not hide these (`planning/speed/data_parallel.py`). Both ways have the same
GPUs, the same global batch, the distributed optimizer, and the best of the splits and recomputations that the planner
says
fit: of the eight that it finds fastest, the one that is in the simulation.
Megatron-FSDP and interleaved stages are in neither. Co-located there are three kinds, each with those before it:

- "even": no context parallelism, as many layers on each stage (the embedding and the loss may count as one each);
- "uneven": any number of layers beside the tower on the first stage;
- "any": with context parallelism, too, which vision on ranks of its own cannot have.

Lines of the CSV file:

- steps: `over_any` is a step's time over that of the best co-located way, "any". `busy` is the share of the step that
  the tower's ranks, and those of the busiest stage of the language model, work.
- vision ranks: the language model's split stays, and the tower gets fewer or more ranks than the rule says.

What lives here: rows, ways that are tried, the figures. What may not: stages' seconds (`two_towers.py`), code that
training needs.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from qwen3vl_bridge.models.qwen3_vl.presets import config_dict
from qwen3vl_bridge.planning.encoder_ranks import DistSplit
from qwen3vl_bridge.planning.encoder_sizing import DistProposal, size
from qwen3vl_bridge.planning.memory.estimate import check, estimate_of
from qwen3vl_bridge.planning.proposals import MARGIN, splits, ways
from qwen3vl_bridge.planning.reports import words_of, words_of_training
from qwen3vl_bridge.planning.settings import Sharding, Training
from qwen3vl_bridge.planning.speed.data_parallel import data_seconds
from qwen3vl_bridge.planning.speed.microbatch_flops import Costs
from qwen3vl_bridge.planning.speed.stage_times import Contents, Mix, language_paces, mean_passes, tower_pace
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.dimensions import Dimensions
from qwen3vl_bridge.weights.model_parts import Part

import numpy as np
import packing
import record
from two_towers import GPU, Model, Row, Simulated, colocated, dist_train

_RESULTS = record.RESULTS / "dist_train.csv"
_TRIED = 8
# Shares of the kinds of `packing.KINDS`.
MIXES = {
    "published": None,
    "pictures in every sample": (0.0, 0.64, 0.22, 0.14),
    "mostly text": (0.80, 0.13, 0.04, 0.03),
}
# Of co-located ways: whether context parallelism and uneven stages are among them.
KINDS = {"even": (False, False), "uneven": (False, True), "any": (True, True)}
# GPUs and rows of a step.
SIZES = {"8B": ((16, 96), (32, 96)), "30B-A3B": ((16, 96), (32, 96)), "235B-A22B": ((128, 192), (144, 192))}
_VISION = frozenset({Part.VISION_MODEL})


def make_rows(mix: str, count: int, capacity: int) -> tuple[list[Row], int, Mix]:
    """Rows, the most patches that one holds, and what the sizing rule asks of them."""
    made = packing.make_samples(count, shares=MIXES[mix])
    samples = [sample for sample in made if sample.size.tokens <= capacity]
    mean = sum(one.size.patches for one in samples) / (sum(one.size.tokens for one in samples) / capacity)
    most = round(1.15 * mean)
    samples = [sample for sample in samples if sample.size.patches <= most]
    sizes = [sample.size for sample in samples]
    rows = [
        Row(sum(sizes[i].tokens ** 2 for i in row), tuple(n for i in row for n in samples[i].patches))
        for row in packing.planned(sizes, capacity, most, 512)
    ]
    frames = np.array([n for row in rows for n in row.frames], float)
    return (
        rows,
        most,
        Mix(
            patches=frames.sum() / (len(rows) * capacity),
            frame=(frames**2).sum() / frames.sum(),
            sample=sum(row.token_pairs for row in rows) / (len(rows) * capacity),
            largest=float(np.mean([max(row.frames, default=0) for row in rows])),
        ),
    )


def colocated_ways(model: Model, gpus: int, mix: Mix, kind: str) -> Iterator[tuple[Split, Training]]:
    """Splits of a kind that fit, the fastest by the planner's times first."""
    n, contents, timed = model.n, Contents.of(model.training, mix), []
    for split in _colocated_splits(n, gpus, model.training.seq_length, *KINDS[kind]):
        try:
            check(n, split, model.training)
        except ValueError:
            continue  # not a way to split this model, or these rows
        for way in ways(n, split, model.training):
            if way.sharding is Sharding.OPTIMIZER:
                paces = language_paces(model.costs, n, split, way, GPU)
                stages = [pace.both.of(contents.tokens, contents.token_pairs) for pace in paces]
                tower = tower_pace(model.costs, n, split, way, GPU).both
                stages[0] += tower.of(contents.patches, contents.patch_pairs) / split.cp
                turns = split.microbatches(way.global_batch_size, 1)
                waited = data_seconds(n, split, way, 1, GPU, mean_passes(paces, contents))
                seconds = (turns - 1) * max(stages) + sum(stages) + waited
                timed.append((seconds, len(timed), split, way))
    seen = set()
    for _, _, split, way in sorted(timed, key=lambda one: one[:2]):
        if split not in seen:
            held = estimate_of(n, split, way, model.costs.chosen, stages={0, 1, split.pp - 1})
            if held.worst.total <= GPU.memory_bytes * (1 - MARGIN):
                seen.add(split)
                yield split, way


def _colocated_splits(n: Dimensions, gpus: int, seq_length: int, context: bool, uneven: bool) -> Iterator[Split]:
    layers = len(n.indices["text_layers"])
    for split in splits(n, gpus, GPU, seq_length, {} if context else {"cp": 1}):
        yield split
        if uneven and split.pp > 1:  # and with so few layers beside the tower that others have as many
            even = -(-layers // split.pp)
            plain = replace(split, embedding_as_layer=False, loss_as_layer=False)
            for first in range(even):
                if (layers - first) % (split.pp - 1) == 0:
                    yield replace(plain, first_layers=first)


def compare(name: str, gpus: int, batch: int, mix: str, capacity: int, frozen: bool, args) -> Iterator[dict]:
    """Lines of the CSV file for one model, mix and number of GPUs."""
    rows, most, of_rows = make_rows(mix, args.samples, capacity)
    config, frozen_parts = config_dict(name), _VISION if frozen else frozenset()
    training = Training(seq_length=capacity, max_patches=most, global_batch_size=batch, frozen=frozen_parts)
    model = Model(name, dimensions_of(config), Costs.of(config, training), training)
    batches = [rows[first : first + batch] for first in range(0, len(rows) - batch + 1, batch)][: args.batches]

    def mean(simulate: Callable[[Sequence[Row]], Simulated]) -> Simulated:
        found = [simulate(batch) for batch in batches]
        names = ("seconds", "vision", "language")
        return replace(found[0], **{name: float(np.mean([getattr(one, name) for one in found])) for name in names})

    def simulate(found: DistProposal) -> Simulated:
        one = found.sized
        return mean(lambda batch: dist_train(replace(model, training=one.training), one.split, one.data, batch))

    here = {
        "model": name,
        "gpus": gpus,
        "row": capacity,
        "rows a step": batch,
        "mix": mix,
        "tower": _tower_word(frozen),
    }
    found, known = dict[str, list[Simulated]](), list[Simulated]()
    for kind in KINDS:
        tried = itertools.islice(colocated_ways(model, gpus, of_rows, kind), _TRIED)
        known = known + [
            mean(lambda batch, split=split, way=way: colocated(replace(model, training=way), split, batch))
            for split, way in tried
        ]
        found[f"co-located, {kind}"] = known
    found["dist-train"] = [simulate(one) for one in size(config, gpus, GPU, training, mix=of_rows, best=_TRIED)]
    fastest = {how: min(some, key=lambda one: one.seconds) for how, some in found.items() if some}
    for how, one in fastest.items():
        yield here | {"what": "steps", "how": how} | _line(one, gpus, batch, fastest.get("co-located, any"))
    if found["dist-train"] and (mix, frozen) == ("published", False):
        yield from _sweep(model, fastest["dist-train"], of_rows, simulate, here)


def _sweep(model: Model, chosen: Simulated, mix: Mix, simulate, here: dict) -> Iterator[dict]:
    """Beside the same language model, other numbers of vision ranks."""
    language, batch = chosen.split.language, here["rows a step"]
    for vision in range(1, 2 * chosen.split.vision.world + 1):
        fixed = {"vision": vision, "vision_tp": chosen.split.vision.tp}
        try:
            found = size(config_dict(model.name), language.world + vision, GPU, chosen.training, language=language,
                         mix=mix, fixed=fixed, best=1)  # fmt: skip
        except ValueError:
            continue  # no number of vision ranks beside these
        for one in found:
            line = _line(simulate(one), language.world + vision, batch, None)
            said = f"{one.sized.needed:.2f} needed, {'keeps up' if one.sized.keeps_up else 'too slow'}"
            yield here | {"gpus": language.world + vision, "what": "vision ranks", "how": said} | line


def _line(one: Simulated, gpus: int, batch: int, best: Simulated | None) -> dict:
    dist = isinstance(one.split, DistSplit)
    language = one.split.language if dist else one.split
    words = words_of(language) + ("" if language.first_layers is None else f", {language.first_layers} layers first")
    tokens = batch * one.training.seq_length / one.seconds / gpus
    return {
        "vision ranks": f"{one.split.vision.world}: {words_of(one.split.vision)}" if dist else "",
        "split": words,
        "recomputed": words_of_training(one.training),
        "simulated_s": f"{one.seconds:.3f}",
        "simulated_tokens_per_gpu_s": f"{tokens:.0f}",
        "over_any": f"{one.seconds / best.seconds:.3f}" if best else "",
        "busy_vision": f"{one.vision:.2f}" if dist else "",
        "busy_language": f"{one.language:.2f}",
    }


def _tower_word(frozen: bool) -> str:
    return "frozen" if frozen else "trained"


def main() -> None:
    """Simulate, print, and append to the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--batches", type=int, default=4, help="global batches (default: %(default)s)")
    parser.add_argument("--row", type=int, default=8192, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=MIXES)
    parser.add_argument("--csv", type=Path, default=_RESULTS, help="default: %(default)s")
    args = parser.parse_args()
    logging.disable(logging.INFO)  # of packing
    cases = [(name, *one, mix, args.row, frozen) for name in args.models for one in SIZES[name]
             for mix in args.mixes for frozen in ((False, True) if mix == "published" else (False,))]  # fmt: skip
    lines = []
    for case in cases:
        for line in compare(*case, args):
            print(*line.values(), sep="\t", flush=True)
            lines.append({"samples": args.samples, "batches": args.batches, **line})
    record.append(args.csv, lines)


if __name__ == "__main__":
    main()
