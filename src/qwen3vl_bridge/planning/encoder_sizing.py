"""The number of vision ranks, if the vision tower is on separate ranks.

What lives here: the rule, and the sizes that are tried. Standard library only. What may not: seconds of a microbatch
(`planning/speed/stage_times.py`), memory (`encoder_ranks.py`).

The rule. A microbatch of a language replica takes the slowest of its stages T seconds, and its images take one
tensor-parallel group of v vision ranks E seconds; both for forward and backward passes with recomputation. With R
language replicas and V vision ranks, V / v groups do the work of R such, so that they keep up only if

    V >= v * R * E / T

V / v is a multiple or a divisor of R. If it is a multiple k, k groups divide the images of a replica, and none has less
than a frame, so a microbatch takes them max(E / k, largest frame) + S, with S for sending; if it is a divisor, R * v /
V times (E + S). That must not exceed T. The sum of V and the language ranks is the number of ranks, and both kinds have
to fit into memory. Among the remaining sizes the shortest step is chosen, and among equal ones that with fewer vision
ranks: m microbatches through p stages with t seconds each, including the tower's, take

    (m - 1) * max(t) + sum(t)

plus the time that the slower module waits for gradients and weights of its replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from qwen3vl_bridge.planning.communication import Passes, boundary_seconds, payload_seconds
from qwen3vl_bridge.planning.encoder_ranks import (
    TOWER,
    DistSplit,
    check_family,
    dist_estimate,
    dist_microbatches,
)
from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.memory.estimate import Estimate
from qwen3vl_bridge.planning.proposals import MARGIN, splits, ways
from qwen3vl_bridge.planning.settings import Sharding, Training
from qwen3vl_bridge.planning.speed.data_parallel import data_seconds, stage_data_seconds
from qwen3vl_bridge.planning.speed.microbatch_flops import Costs
from qwen3vl_bridge.planning.speed.stage_times import PUBLISHED, Contents, Mix, language_paces, mean_passes, tower_pace
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.dimensions import Dimensions


@dataclass(frozen=True)
class Sized:
    """Sizes with separate vision ranks, and their times.

    Attributes:
        split: both modules' ranks.
        training: rows, sharding, recomputation.
        needed: vision ranks that the rule requires, at the same tensor parallelism.
        vision: seconds of a microbatch on the vision ranks.
        language: of each stage of the language model.
        data: seconds of a step that wait for gradients and weights of replicas.
    """

    split: DistSplit
    training: Training
    needed: float
    vision: float
    language: tuple[float, ...]
    data: float

    @property
    def keeps_up(self) -> bool:
        """Whether the tower is no slower than the slowest stage of the language model."""
        return self.vision <= max(self.language)

    @property
    def rows(self) -> int:
        """Rows of a step, on all ranks."""
        return dist_microbatches(self.split, self.training) * self.split.language.dp * self.training.micro_batch_size

    @property
    def seconds_per_row(self) -> float:
        """Orders sizes."""
        times, microbatches = (self.vision, *self.language), dist_microbatches(self.split, self.training)
        return ((microbatches - 1) * max(times) + sum(times) + self.data) / self.rows


@dataclass(frozen=True)
class DistProposal:
    """Sizes that fit, and their memory."""

    sized: Sized
    estimate: Estimate


def measure(costs: Costs, n: Dimensions, split: DistSplit, training: Training, gpu: Gpu, mix: Mix = PUBLISHED) -> Sized:
    """Compute the times of sizes.

    Args:
        costs: the model's.
        n: its dimensions.
        split: its ranks.
        training: what is trained and recomputed.
        gpu: the kind of the `split.world` GPUs.
        mix: contents of rows.
    """
    row, joined = Contents.of(training, mix), n["v_merged"] // n["v_hidden"]
    sent = payload_seconds(n, split.language, training, gpu, row.patches / joined)
    back = sent.backward * bool(costs.step.patch - costs.forward.patch)
    pace = tower_pace(costs, n, split.vision, training, gpu)
    tower = pace.both.of(row.patches, row.patch_pairs)
    share = tower / split.replicas.encoders
    if split.replicas.encoders > 1:
        share = max(share, min(pace.both.of(mix.largest, mix.largest**2), tower))
    paces = language_paces(costs, n, split.language, training, gpu)
    # In each direction a stage sends to one neighbour while it receives from the other.
    hop = boundary_seconds(n, split.language, training, gpu, len(n.indices["deepstack_mergers"]), row.tokens, 0)
    hops = 2 * hop * (split.language.pp > 1)
    language = [pace.both.of(row.tokens, row.token_pairs) + hops for pace in paces]
    # The first stage receives one vision rank's part after the other; a vision rank sends to one replica at a time.
    language[0] += sent.forward + back
    vision = split.replicas.language_per_encoder * (share + sent.forward + back)
    needed = split.vision.tp * split.language.dp * tower / max(language)
    encoded = split.replicas.language_per_encoder * share / tower if tower else 0.0
    of_tower = Passes(*(encoded * way.of(row.patches, row.patch_pairs) for way in (pace.forward, pace.backward)))
    data = max(
        data_seconds(n, split.language, training, 1, gpu, mean_passes(paces, row)),
        stage_data_seconds(n, split.vision, (TOWER,), training, 1, gpu, of_tower),
    )
    return Sized(split, training, needed, vision, tuple(language), data)


def size(
    config: Mapping,
    gpus: int,
    gpu: Gpu,
    training: Training,
    *,
    language: Split | None = None,
    mix: Mix = PUBLISHED,
    fixed: Mapping[str, int] | None = None,
    best: int = 5,
) -> list[DistProposal]:
    """The best sizes for a number of GPUs, best first; empty if nothing fits, or no tower keeps up.

    Args:
        config: a `config.json` as a mapping.
        gpus: vision and language ranks together.
        gpu: the kind of GPU.
        training: as it is used with `language`; otherwise its sharding and recomputation are chosen here.
        language: the language model's sizes, whose `world` is computed here; None to choose them.
        mix: contents of rows.
        fixed: without `language`, given sizes of `Split`; "vision" and "vision_tp" are those of the vision ranks. With
            a given number of vision ranks, the tower need not keep up.
        best: maximum number of results.

    Raises:
        ValueError: a family that does not support separate vision ranks; with `language`, if no number of vision ranks
            fits, where the message has the last reason.
    """
    n, costs, fixed = dimensions_of(config), Costs.of(config, training), dict(fixed or {})
    check_family(n)
    tried, refused = list[Sized](), ""
    for split in _candidates(n, gpus, gpu, training, language, fixed):
        try:
            split.check(n, training)
        except ValueError as error:
            refused = str(error)
            continue  # not a way to split this model, or these rows
        chosen = [training] if language else _ways(n, split, training)
        tried += [measure(costs, n, split, way, gpu, mix) for way in chosen]
    if language and not tried:
        raise ValueError(
            f"no number of vision ranks works on {gpus} GPUs with this language model{refused and ': '}{refused}"
        )
    if "vision" not in fixed:
        tried = [one for one in tried if one.keeps_up]
    found: dict[DistSplit, DistProposal] = {}
    for one in sorted(tried, key=lambda one: (round(one.seconds_per_row, 9), one.split.vision.world)):
        if one.split not in found:
            held = dist_estimate(n, one.split, one.training, costs.chosen)
            if held.worst.total <= gpu.memory_bytes * (1 - MARGIN):
                found[one.split] = DistProposal(one, held)
        if len(found) == best:
            break
    return list(found.values())


def _candidates(
    n: Dimensions, gpus: int, gpu: Gpu, training: Training, language: Split | None, fixed: Mapping[str, int]
) -> Iterator[DistSplit]:
    sizes = {name: value for name, value in fixed.items() if not name.startswith("vision")} | {"cp": 1}
    for vision in [fixed["vision"]] if "vision" in fixed else range(1, gpus):
        world = gpus - vision
        if language is None:
            beside = splits(n, world, gpu, training.seq_length, sizes)
        elif world % (language.tp * language.pp * language.cp):
            continue
        else:
            beside = iter([replace(language, world=world)])
        widths = [fixed["vision_tp"]] if "vision_tp" in fixed else [1, 2, 4, 8]
        for one in beside:
            yield from (DistSplit.of(vision, tp, one) for tp in widths if not vision % tp)


def _ways(n: Dimensions, split: DistSplit, training: Training) -> list[Training]:
    return [one for one in ways(n, split.language, training) if one.sharding is Sharding.OPTIMIZER]
