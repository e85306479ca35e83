"""The memory of each rank of a run, and the rank that needs most.

What lives here: the sum of states, activations and the reserve. Standard library only. What may not: their formulas,
which splits to try (`planning/proposals.py`), text (`planning/reports.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from qwen3vl_bridge.planning.hardware import GIB
from qwen3vl_bridge.planning.memory.in_flight_microbatches import most_in_flight
from qwen3vl_bridge.planning.memory.microbatch_activations import Activations, chunk_activations
from qwen3vl_bridge.planning.memory.model_states import States, stage_states
from qwen3vl_bridge.planning.memory.parameters import adapter_widths, kinds_of_layers
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.dimensions import Dimensions

# Assumed, not measured: the CUDA context and its kernels, NCCL's buffers of several groups, workspaces of cuBLAS and
# Transformer Engine.
FIXED_RESERVE = 4 * GIB
# Assumed too: fragmentation of the allocator between short-lived tensors. States are allocated once, in one piece.
FRAGMENTED = 0.10


@dataclass(frozen=True)
class StageEstimate:
    """Peak bytes on each rank of a pipeline stage.

    Attributes:
        stage: pipeline rank; -1 for separate vision ranks.
        layers: text layers of its chunks.
        states: parameters, gradients, optimizer.
        activations: stored activations of the microbatches in flight, by module.
        in_flight: microbatches of each of its chunks.
        passing: temporary memory of the layer being computed.
        reserve: memory other than the run's tensors.
    """

    stage: int
    layers: int
    states: States
    activations: Mapping[str, float]
    in_flight: tuple[int, ...]
    passing: float
    reserve: float

    @property
    def total(self) -> float:
        """The maximum of forward and backward pass, the optimizer's step, and before the model is sharded."""
        passes = self.states.total + sum(self.activations.values()) + self.passing + self.reserve
        return max(passes, self.updating, self.states.unsharded + FIXED_RESERVE)

    @property
    def updating(self) -> float:
        """Memory while the optimizer steps."""
        return self.states.total + (1 + FRAGMENTED) * self.states.updating + FIXED_RESERVE

    def as_dict(self) -> dict[str, object]:
        """For JSON, in bytes."""
        return {
            "stage": self.stage,
            "layers": self.layers,
            "parameters": self.states.parameters,
            "gradients": self.states.gradients,
            "optimizer": self.states.optimizer,
            "gathered": self.states.gathered,
            "unsharded": self.states.unsharded,
            "updating": self.states.updating,
            "activations": {name: round(value) for name, value in self.activations.items()},
            "microbatches_in_flight": list(self.in_flight),
            "passing": round(self.passing),
            "reserve": round(self.reserve),
            "total": round(self.total),
            "host_while_saving": self.states.written + self.states.whole,
        }


@dataclass(frozen=True)
class Estimate:
    """All stages of a run; `worst` is the one that has to fit.

    Attributes:
        split: of the language model, and of the tower unless it is on separate ranks.
        training: how it is trained.
        stages: the language model's, preceded by that of separate vision ranks.
        dist: those ranks (`planning/encoder_ranks.py`), or None.
    """

    split: Split
    training: Training
    stages: tuple[StageEstimate, ...]
    dist: Split | None = None

    @property
    def worst(self) -> StageEstimate:
        """The stage whose ranks need most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def saving(self) -> States:
        """The stage whose ranks need most host memory while a checkpoint is saved."""
        return max((stage.states for stage in self.stages), key=lambda states: states.written + states.whole)


def estimate(config: Mapping, split: Split, training: Training, *, vocab: int | None = None) -> Estimate:
    """The memory of each rank.

    Args:
        config: a `config.json` as a mapping.
        split: parallel sizes.
        training: rows, precision, what is trained, recomputation.
        vocab: rows of the embedding, if they are more than the configuration's.

    Raises:
        ValueError: the model cannot be split this way, or the settings contradict each other.
        KeyError: the configuration lacks a field; the message names it.
    """
    n = dimensions_of(config)
    if vocab is not None:
        n = n.with_vocab(vocab)
    check(n, split, training)
    return estimate_of(n, split, training, n["chosen_experts"])


def check(n: Dimensions, split: Split, training: Training) -> None:
    """Check that a model can be trained this way.

    Raises:
        ValueError: it cannot; the message says why.
    """
    split.check(n)
    split.check_rows(training.seq_length)
    split.microbatches(training.global_batch_size, training.micro_batch_size)
    if training.lora is not None:
        known = {name for layers in kinds_of_layers(n) for name in adapter_widths(n, layers[0])}
        if not known & set(training.lora.targets):
            raise ValueError(
                f"LoRA's targets are {training.lora.targets}, none of which this model has outside its experts, which "
                f"get no adapters; expected some of {', '.join(sorted(known))}"
            )
    if training.trains_mtp and not n.sizes.get("mtp"):
        raise ValueError("this model has no multi-token prediction to train; omit --mtp")
    moe = {"moe", "moe_act"} & training.recompute.modules
    if moe and not n.indices["moe_layers"]:
        raise ValueError(f"recompute_modules has {sorted(moe)}, expected neither: this model has no experts")
    if "mlp" in training.recompute.modules and not n.indices["dense_layers"]:
        raise ValueError("recompute_modules has 'mlp', expected 'moe': every layer of this model has experts")


def estimate_of(
    n: Dimensions, split: Split, training: Training, chosen: int, *, stages: Collection[int] | None = None
) -> Estimate:
    """Like `estimate`, for dimensions that have been checked, and only these pipeline stages; None for all."""
    microbatches = split.microbatches(training.global_batch_size, training.micro_batch_size)
    estimated = []
    for chunks in split.chunks(len(n.indices["text_layers"])):
        if stages is not None and chunks[0].stage not in stages:
            continue
        found = [chunk_activations(n, split, training, chunk, chosen=chosen) for chunk in chunks]
        _, in_flight = most_in_flight(split, chunks[0].stage, microbatches, [one.total for one in found])
        activations = _add(found, in_flight)
        passing = max(one.passing for one in found)
        reserve = FIXED_RESERVE + FRAGMENTED * (sum(activations.values()) + passing)
        states = stage_states(n, split, chunks, training)
        layers = sum(len(chunk.layers) for chunk in chunks)
        estimated.append(StageEstimate(chunks[0].stage, layers, states, activations, in_flight, passing, reserve))
    return Estimate(split, training, tuple(estimated))


def _add(found: list[Activations], counts: tuple[int, ...]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one, count in zip(found, counts, strict=True):
        for name, value in one.kept.items():
            total[name] = total.get(name, 0.0) + count * value
    return total
