"""Bytes of parameters, gradients and optimizer state on one rank.

What lives here: bytes per rank for each kind of sharding, and host memory while saving. Standard library only. What may
not: counting parameters (`parameters.py`), activations (`microbatch_activations.py`).

Weights and gradients of the model, the optimizer's main copy of the weights, Adam's two moments: mixed precision after
Micikevicius et al. (arXiv 1710.03740), sharding after Rajbhandari et al. (ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwen3vl_bridge.planning.memory.parameters import (
    Count,
    adapter_count,
    chunk_count,
    held_and_trained,
    kinds_of_layers,
    layer_count,
    mtp_layer_count,
    vision_layer_count,
)
from qwen3vl_bridge.planning.settings import Sharding, Training
from qwen3vl_bridge.planning.split import Chunk, Split
from qwen3vl_bridge.weights.dimensions import Dimensions

# Layers whose weights, and whose gradients, are whole on a rank under ZeRO-3: the current one and its neighbour, which
# is prefetched or still being reduced.
UNITS = 2
# In checkpoints the optimizer has three float32 numbers per parameter: its main copy, and Adam's moments.
STORED = 12
_ORDER = list(Sharding)


@dataclass(frozen=True)
class States:
    """Bytes on one rank.

    Attributes:
        parameters: weights, including frozen ones.
        gradients: of trained parameters.
        optimizer: its main copy of the weights, and the moments.
        gathered: under ZeRO-3, weights and gradients that are temporarily whole.
        unsharded: under Megatron-FSDP, before sharding: weights, which are created whole on each rank.
        updating: while the optimizer steps and activations are freed: without Transformer Engine Adam is torch's
            (`compat/adam.py`), which on a GPU holds the square roots of all second moments of a group of parameters at
            once; with expert parallelism experts are a group, and all others one after it. Not with Megatron-FSDP,
            whose parameters (DTensors) torch updates one by one. Source: torch 2.13, `optim/adam.py`,
            `_default_to_fused_or_foreach`, `_multi_tensor_adam`.
        written: on the host, while a checkpoint is saved: the rank's part of it.
        whole: on the host too, if the optimizer's state is saved by parameters (`Training.saved_by_parameters`): that
            of all parameters of the rank, which every data-parallel rank gathers. Source: megatron-core 0.19,
            `DistributedOptimizer.sharded_param_state_fully_reshardable`.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    unsharded: int
    updating: int
    written: int
    whole: int

    @property
    def total(self) -> int:
        """Total on the GPU in a step."""
        return self.parameters + self.gradients + self.optimizer + self.gathered


def stage_states(n: Dimensions, split: Split, chunks: tuple[Chunk, ...], training: Training) -> States:
    """Bytes on a rank of one pipeline stage.

    Args:
        n: the model's dimensions.
        split: parallel sizes.
        chunks: those of the stage.
        training: precision, sharding, what is frozen.

    Raises:
        ValueError: a kind of sharding that does not support pipeline stages.
    """
    if training.sharding in (Sharding.GRADIENTS, Sharding.ALL) and split.pp > 1:
        raise ValueError(
            f"pp is {split.pp} with {training.sharding.value}, expected 1: Megatron-FSDP does not "
            "support pipeline stages"
        )
    held, trained = held_and_trained(n, split, chunks, training)
    if training.lora is not None:
        adapters = sum(adapter_count(n, split, chunk, training.lora) for chunk in chunks)
        held, trained = held + Count(language_model=adapters), trained + Count(language_model=adapters)
    precision, sharding = training.precision, training.sharding
    gradient, main = precision.under(sharding)

    def share(count: Count, at: Sharding) -> float:
        if _ORDER.index(sharding) < _ORDER.index(at):
            return count.total
        return count.shared / split.replicas + count.experts / split.expert_replicas

    divided = trained.shared / split.replicas + trained.experts / split.expert_replicas
    by_torch = not training.transformer_engine and sharding in (Sharding.NONE, Sharding.OPTIMIZER)
    groups = (replace(trained, experts=0), Count(experts=trained.experts)) if split.ep > 1 else (trained,)
    by_parameters = sharding is Sharding.OPTIMIZER and training.saved_by_parameters
    made_whole = sharding in (Sharding.GRADIENTS, Sharding.ALL) and not training.made_on_host
    return States(
        parameters=round(precision.weight * share(held, Sharding.ALL)),
        gradients=round(gradient * share(trained, Sharding.GRADIENTS)),
        optimizer=round((main + precision.moments) * share(trained, Sharding.OPTIMIZER)),
        gathered=_gathered(n, split, chunks, training, held) if sharding is Sharding.ALL else 0,
        unsharded=precision.weight * held.total * made_whole,
        updating=round(precision.moments / 2 * max(share(one, Sharding.OPTIMIZER) for one in groups) * by_torch),
        written=round((precision.weight + STORED) * divided),
        whole=STORED * trained.total * by_parameters,
    )


def _gathered(n: Dimensions, split: Split, chunks: tuple[Chunk, ...], training: Training, held: Count) -> int:
    """Under ZeRO-3: parameters outside of layers for the whole step, and some layers of the largest kind."""
    mtp = mtp_layer_count(n, split).total
    units = [mtp, *(layer_count(n, split, layers[0]).total for layers in kinds_of_layers(n))]
    only_layers = [replace(chunk, first=False, last=False, tower=False) for chunk in chunks]
    in_layers = mtp + sum(chunk_count(n, split, chunk).total for chunk in only_layers)
    in_tower = vision_layer_count(n, split) * len(n.indices["vision_layers"]) * any(chunk.tower for chunk in chunks)
    whole = held.total - in_layers - in_tower + UNITS * max(units)
    gradient, _ = training.precision.under(training.sharding)
    trained = gradient * (training.lora is None)
    return (training.precision.weight + trained) * whole
