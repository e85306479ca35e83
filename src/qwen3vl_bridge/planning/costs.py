"""A rough time of a step: what orders the splits that fit.

What lives here: the model, stated below. Standard library only. What may not: memory, which splits there are
(`propose.py`). It orders; it does not predict: nothing overlaps in it, kernels all reach one share of the peak, and
links half of theirs.

- Work: operations of `cost.py`, three times a forward pass, and once more those of what is recomputed. It is that of
  the mean stage.
- Tensor and sequence parallelism: a layer gathers and scatters hidden states twice in each direction, and gathers
  twice more in backward (Korthikanti et al., arXiv 2205.05198, section 4.2.2); the tower reduces instead.
- Context: keys and values go around, in forward once, in backward twice.
- Experts: tokens to their experts and back, in forward and backward.
- Pipeline: a microbatch takes as long as the slowest stage, and the others wait; the tower and the output layer weigh
  on theirs. The first microbatch passes through all (Narayanan et al., arXiv 2104.04473, section 2.2).
- Data: gradients and weights once a step; under ZeRO-3 weights twice and gradients once a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from qwen3vl_bridge.cost import tower_costs
from qwen3vl_bridge.dimensions import Dimensions
from qwen3vl_bridge.planning.activations import Work
from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.parameters import chunk_count
from qwen3vl_bridge.planning.settings import Sharding, Training
from qwen3vl_bridge.planning.split import Split

REACHED = 0.45  # of the peak, by kernels
LINK = 0.5  # of a link


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
        """All of it."""
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def overhead(self) -> dict[str, float]:
        """What is not work, over work."""
        return {f.name: getattr(self, f.name) / self.work for f in fields(self)[1:] if getattr(self, f.name)}


def step_time(config: Mapping, n: Dimensions, split: Split, training: Training, gpu: Gpu) -> StepTime:
    """The time of one step.

    Args:
        config: a Qwen3-VL `config.json` as a mapping.
        n: its numbers.
        split, training: a way to train it.
        gpu: of which there are `split.world`.
    """
    microbatches = split.microbatches(training.global_batch_size, training.micro_batch_size)
    work, e = Work.of(n, split, training), training.precision.weight
    rate = REACHED * gpu.bf16_flops * split.tp
    stages, again = (
        [operations / rate for operations in each] for each in _operations(config, n, split, training, work)
    )
    mean = sum(stages) / split.pp
    layers = len(n.indices["text_layers"]) / split.pp
    hidden = work.tokens * n["hidden"] * e

    def link(ranks: int) -> float:
        """Bytes a second between ranks that so many neighbours share."""
        return LINK * (gpu.nvlink_bytes if ranks <= gpu.nvlink_gpus else gpu.network_bytes)

    cut = (split.tp - 1) / split.tp
    of_tower = 8 * len(n.indices["vision_layers"]) * work.patches * n["v_hidden"] * e
    tensor = cut * (10 * layers * hidden + of_tower) / link(split.tp)
    keys = 3 * layers * (split.cp - 1) * 2 * work.tokens * n["kv"] / split.tp * e
    experts = 0.0
    if n.indices["moe_layers"] and split.ep > 1:
        chosen = config["text_config"]["num_experts_per_tok"]
        routed = chosen * hidden / split.sequence_ranks * split.expert_tp * (split.ep - 1) / split.ep
        # Of what goes to so many ranks, what leaves the machine sets the time.
        away = max(1 - gpu.nvlink_gpus / (split.ep * split.expert_tp), 0.0)
        moe = len(n.indices["moe_layers"]) / split.pp * training.expert_load
        experts = 4 * moe * routed * ((1 - away) / link(1) + away / link(split.world + gpu.nvlink_gpus))
    # Every microbatch takes as long as the slowest stage; the first one passes through the others as well.
    slowest = max(3 * one + two for one, two in zip(stages, again, strict=True))
    busy = 3 * mean + sum(again) / split.pp
    passes = (split.pp - 1) / (split.vpp or 1)
    return StepTime(
        work=3 * microbatches * mean,
        recomputing=microbatches * sum(again) / split.pp,
        tensor=microbatches * tensor,
        context=microbatches * keys / link(split.tp * split.cp),
        experts=microbatches * experts,
        data=_data(n, split, training, microbatches, link(split.world)),
        waiting=microbatches * (slowest - busy) + passes * busy,
    )


def _operations(
    config: Mapping, n: Dimensions, split: Split, training: Training, work: Work
) -> tuple[list[float], list[float]]:
    """Operations of a microbatch's forward pass in each pipeline stage, and those that are done again in backward."""
    costs, layers = tower_costs(config), len(n.indices["text_layers"])
    head = 2 * n["hidden"] * n["vocab"] * work.tokens
    pairs = costs.token_pair * training.seq_length * work.tokens
    each = (costs.token * work.tokens - head + pairs) / layers
    tower = costs.patch * work.patches  # frames are short beside their width: pairs of patches are left out
    chosen = config["text_config"].get("num_experts_per_tok") or 0
    mlp = 6 * n["hidden"] * work.tokens
    recomputed = {
        "mlp": mlp * n["ffn"] * len(n.indices["dense_layers"]) / layers,
        "moe": mlp * n["moe_ffn"] * chosen * len(n.indices["moe_layers"]) / layers,
        "core_attn": pairs / layers,
    }
    whole = training.recompute.granularity == "full"
    layer = each if whole else sum(recomputed.get(name, 0.0) for name in training.recompute.modules)
    stages, again = [], []
    for chunks in split.chunks(layers):
        count = sum(len(chunk.layers) for chunk in chunks)
        first, last = chunks[0].first, chunks[-1].last
        stages.append(count * each + tower * first + head * last)
        again.append(count * layer + tower * first * (training.vision_recompute.granularity == "full"))
    return stages, again


def _data(n: Dimensions, split: Split, training: Training, microbatches: int, link: float) -> float:
    if split.replicas == 1:
        return 0.0
    stages = split.chunks(len(n.indices["text_layers"]))
    # Stages between the second and the last have as many.
    ends = {stage: stages[stage] for stage in (0, min(1, split.pp - 1), split.pp - 1)}.values()
    counts = [sum(chunk_count(n, split, chunk).total for chunk in chunks) for chunks in ends]
    gradient, _ = training.precision.under(training.sharding)
    trained = gradient if training.lora is None else 0
    if training.sharding is Sharding.ALL:
        return microbatches * max(counts) * (2 * training.precision.weight + trained) / link
    return max(counts) * (trained + training.precision.weight * bool(trained)) / link
