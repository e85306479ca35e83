"""Splits of a model that fit, the fastest first.

What lives here: which splits are tried, and their order. Standard library only. What may not: formulas
(`planning/memory/estimate.py`, `planning/speed/step_time.py`). Interleaved stages and expert tensor parallelism are not
tried; `estimate` supports both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.memory.estimate import Estimate, check, estimate_of
from qwen3vl_bridge.planning.settings import FULL, Recompute, Sharding, Training
from qwen3vl_bridge.planning.speed.microbatch_flops import Costs
from qwen3vl_bridge.planning.speed.step_time import StepTime, step_time
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.dimensions import Dimensions
from qwen3vl_bridge.weights.model_parts import Part

MARGIN = 0.05  # of the memory, in addition to the reserve
AS_FAST = 1.02  # ratio of two times below which they count as equal, because times are rough
SHARE = 2048  # minimum tokens of a context-parallel rank


@dataclass(frozen=True)
class Proposal:
    """A way to train that fits.

    Attributes:
        estimate: its memory.
        time: its rough time.
        rows: of a step, on all ranks.
        free: free bytes of the rank that needs most.
    """

    estimate: Estimate
    time: StepTime
    rows: int
    free: float

    @property
    def seconds_per_row(self) -> float:
        """Orders proposals."""
        return self.time.total / self.rows

    @property
    def reason(self) -> str:
        """Its overheads, as fractions of the work."""
        overhead = sorted(self.time.overhead.items(), key=lambda item: -item[1])
        paid = [f"{name} {share:.0%}" for name, share in overhead if share >= 0.005]
        return "overhead: " + (", ".join(paid[:3]) or "none")


def propose(
    config: Mapping, world: int, gpu: Gpu, training: Training, *, best: int = 5, fixed: Mapping[str, int] | None = None
) -> list[Proposal]:
    """The best ways to train a model on a number of GPUs, best first; empty if nothing fits.

    Args:
        config: a `config.json` as a mapping.
        world: number of GPUs.
        gpu: the kind of GPU.
        training: the requested settings; sharding and recomputation are chosen here.
        best: maximum number of results, each with other parallel sizes.
        fixed: sizes of `Split` that are given.

    Raises:
        ValueError: settings that no split supports.
    """
    return propose_of(dimensions_of(config), Costs.of(config, training), world, gpu, training, best=best, fixed=fixed)


def propose_of(
    n: Dimensions,
    costs: Costs,
    world: int,
    gpu: Gpu,
    training: Training,
    *,
    best: int = 5,
    fixed: Mapping[str, int] | None = None,
) -> list[Proposal]:
    """Like `propose`, for a model's dimensions and costs."""
    limit = gpu.memory_bytes * (1 - MARGIN)
    found: list[Proposal] = []
    for estimates in _estimates(n, costs, world, gpu, training, fixed or {}):
        if fitting := [proposal(costs, n, held, gpu) for held in estimates if held.worst.total <= limit]:
            found.append(min(fitting, key=lambda way: way.seconds_per_row))
    # Among equal ones, the simplest.
    return sorted(found, key=lambda one: (round(one.seconds_per_row, 9), _sizes(one.estimate.split)))[:best]


def smallest(
    config: Mapping, world: int, gpu: Gpu, training: Training, *, fixed: Mapping[str, int] | None = None
) -> Estimate | None:
    """What needs least memory of all that `propose` tries, whether it fits or not; None if no split is possible.

    Args and errors: as of `propose`.
    """
    n, costs = dimensions_of(config), Costs.of(config, training)
    tried = (held for estimates in _estimates(n, costs, world, gpu, training, fixed or {}) for held in estimates)
    return min(tried, key=lambda held: held.worst.total, default=None)


def _estimates(
    n: Dimensions, costs: Costs, world: int, gpu: Gpu, training: Training, fixed: Mapping[str, int]
) -> Iterator[list[Estimate]]:
    """All ways to train with each possible split."""
    for split in splits(n, world, gpu, training.seq_length, fixed):
        try:
            check(n, split, training)
        except ValueError:
            continue  # not a way to split this model, or these rows
        # Middle stages hold fewer microbatches of equally many layers.
        stages = {0, 1, split.pp - 1}
        yield [estimate_of(n, split, one, costs.chosen, stages=stages) for one in ways(n, split, training)]


def proposal(costs: Costs, n: Dimensions, held: Estimate, gpu: Gpu) -> Proposal:
    """A way to train with its time, whether it fits or not."""
    split, training = held.split, held.training
    rows = split.dp * split.microbatches(training.global_batch_size, training.micro_batch_size)
    time = step_time(costs, n, split, training, gpu)
    return Proposal(held, time, rows * training.micro_batch_size, gpu.memory_bytes - held.worst.total)


def splits(n: Dimensions, world: int, gpu: Gpu, seq_length: int, fixed: Mapping[str, int]) -> Iterator[Split]:
    """Sizes worth trying: tensor parallelism within a machine, powers of two, stages that divide the layers, and
    context parallelism of rows that are long enough.
    """
    layers = len(n.indices["text_layers"])
    for tp in _choices("tp", fixed, _powers(min(gpu.gpus_per_node, world))):
        for pp in _choices("pp", fixed, range(1, min(layers, world) + 1)):
            as_layers = bool(layers % pp)  # the embedding and the loss count as a layer each
            if pp > 1 and as_layers and (layers + 2) % pp:
                continue
            for cp in _choices("cp", fixed, _powers(min(seq_length // SHARE, world)) or [1]):
                if world % (tp * pp * cp):
                    continue
                most = min(n["experts"] or 1, world // pp)
                for ep in _choices("ep", fixed, _powers(most)):
                    if world % (pp * ep):
                        continue
                    etp = 1 if n["experts"] else None
                    yield Split(
                        world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sequence_parallel=tp > 1,
                        embedding_as_layer=as_layers, loss_as_layer=as_layers,
                    )  # fmt: skip


def ways(n: Dimensions, split: Split, training: Training) -> Iterator[Training]:
    """Sharding and recomputation, the cheapest in time first."""
    kinds = [Sharding.OPTIMIZER] + ([Sharding.ALL] if split.pp == 1 and split.replicas > 1 else [])
    text = [Recompute(), FULL]
    if n.indices["moe_layers"]:
        text.insert(1, Recompute("selective", modules=frozenset({"moe_act", "layernorm"})))
    else:
        text.insert(1, Recompute("selective", modules=frozenset({"mlp"})))
    tower = [Recompute(), FULL] if Part.VISION_MODEL not in training.frozen_weights else [Recompute()]
    for sharding in kinds:
        for recompute in text:
            for vision in tower:
                yield replace(training, sharding=sharding, recompute=recompute, vision_recompute=vision)


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _choices(name: str, fixed: Mapping[str, int], tried: range | list[int]) -> range | list[int]:
    return [fixed[name]] if name in fixed else tried


def _sizes(split: Split) -> tuple[int, ...]:
    return split.pp, split.tp, split.cp, split.ep
