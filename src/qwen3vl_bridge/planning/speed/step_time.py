"""A rough time of a step, by which splits that fit are ordered.

What lives here: the model, stated below. Standard library only. What may not: memory, which splits there are
(`planning/proposals.py`), FLOPs and bytes (`microbatch_flops.py`, `planning/communication.py`). It orders; it does not
predict: within a replica nothing overlaps in it, kernels all reach one fraction of the peak, and links half of their
bandwidth.

- Work: FLOPs of `models/common/flops.py`, three times a forward pass, plus recomputation. It is that of the mean stage.
- Communication: `planning/communication.py`.
- Pipeline: a microbatch takes as long as the slowest stage, and the others wait; the tower and the output layer add to
  theirs. The first microbatch passes through all (Narayanan et al., arXiv 2104.04473, section 2.2).
- Data: communication between replicas that is not overlapped, `data_parallel.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from qwen3vl_bridge.planning.communication import Passes, layer_seconds, tower_seconds
from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.memory.microbatch_activations import Work
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.speed.data_parallel import data_seconds
from qwen3vl_bridge.planning.speed.microbatch_flops import Costs, language_operations, tower_operations
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.weights.dimensions import Dimensions

REACHED = 0.45  # fraction of the peak that kernels reach


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the busiest rank, by cause."""

    work: float
    recomputing: float
    tensor: float
    context: float
    experts: float
    data: float
    waiting: float

    @property
    def total(self) -> float:
        """Sum of all causes."""
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def overhead(self) -> dict[str, float]:
        """Everything except work, divided by work."""
        return {f.name: getattr(self, f.name) / self.work for f in fields(self)[1:] if getattr(self, f.name)}


def step_time(costs: Costs, n: Dimensions, split: Split, training: Training, gpu: Gpu) -> StepTime:
    """The time of one step.

    Args:
        costs: the model's.
        n: its dimensions.
        split, training: a way to train it.
        gpu: the kind of the `split.world` GPUs.
    """
    microbatches = split.microbatches(training.global_batch_size, training.micro_batch_size)
    work = Work.of(n, split, training)
    rate = REACHED * gpu.bf16_flops * split.tp
    stages, again = (
        [operations / rate for operations in each] for each in _operations(costs, n, split, training, work)
    )
    mean = sum(stages) / split.pp
    sent = layer_seconds(costs.chosen, n, split, training, gpu)
    layers = (len(n.indices["text_layers"]) + training.trains_mtp) / split.pp
    of_layers = {cause: layers * work.tokens * passes.both for cause, passes in sent.items()}
    of_tower = work.patches * tower_seconds(n, split, training, gpu).both
    # Every microbatch takes as long as the slowest stage; the first one passes through the others as well.
    slowest = max(3 * one + two for one, two in zip(stages, again, strict=True))
    busy = 3 * mean + sum(again) / split.pp
    passes = (split.pp - 1) / (split.vpp or 1)
    return StepTime(
        work=3 * microbatches * mean,
        recomputing=microbatches * sum(again) / split.pp,
        tensor=microbatches * (of_layers["tensor"] + of_tower),
        context=microbatches * of_layers["context"],
        experts=microbatches * of_layers["experts"],
        data=data_seconds(n, split, training, microbatches, gpu, Passes(mean, 2 * mean + sum(again) / split.pp)),
        waiting=microbatches * (slowest - busy) + passes * busy,
    )


def _operations(
    costs: Costs, n: Dimensions, split: Split, training: Training, work: Work
) -> tuple[list[float], list[float]]:
    """FLOPs of a microbatch's forward pass in each pipeline stage, and those of recomputation."""
    pairs = training.seq_length * work.tokens
    # Frames are short compared with their width: pairs of patches are left out.
    of_tower = tower_operations(costs, training)
    stages, again = [], []
    for number, one in enumerate(language_operations(costs, n, split, training)):
        first = number == 0
        stages.append(one.forward.of(work.tokens, pairs) + first * of_tower.forward.of(work.patches, 0))
        again.append(one.again.of(work.tokens, pairs) + first * of_tower.again.of(work.patches, 0))
    return stages, again
