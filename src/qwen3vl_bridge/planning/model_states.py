"""Parameters of one rank, counted from the weight table; the bytes of their gradients and optimizer state on its GPU,
and of its host memory while a checkpoint is saved, which `training/run_refusals.py` compares with the machine's.

Mixed precision after Micikevicius et al. (arXiv 1710.03740), sharding after Rajbhandari et al. (ZeRO, arXiv
1910.02054).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from qwen3vl_bridge.planning.split import ModelSplit, PipelineChunk
from qwen3vl_bridge.planning.training_settings import LINEAR_LAYERS, Sharding, TrainingSettings
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.rows import Dimensions, Part, WeightRow, is_of_experts, is_of_mtp, part_of

_EMBEDDING = "language_model.embedding.word_embeddings.weight"
# Replicated on all tensor-parallel ranks, in addition to the rows marked so: norms, the router, and biases of layers
# whose inputs are split. Everything else is split along one of its dimensions, which gives the same count.
_REPLICATED = ("norm.", "_norm_", "mlp.router.", "linear_proj.bias", "linear_fc2.bias")
# Indices that count text layers, each of which is on one pipeline stage.
_LAYERS = ("text_layers", "dense_layers", "moe_layers", "linear_layers", "full_layers")
# Under ZeRO-3, elements of unsharded gradients that wait to be reduced, or those of two layers (a layer's own come when
# what it computed with is freed); half as many of weights are gathered ahead. Source: megatron-core 0.19,
# Megatron-FSDP's `suggested_communication_unit_size`.
_REDUCED_LATER = 1_000_000_000
# In checkpoints the optimizer has three float32 numbers per parameter: its main copy, and Adam's moments.
STORED_BYTES = 12


@functools.cache
def _counted_rows(family_name: str) -> tuple[tuple[WeightRow, str, bool], ...]:
    """A family's weight table: each row with its kind of parameters, its part's name or "experts", and whether tensor
    parallelism replicates it.
    """
    rows = []
    for row in family(family_name).rows():
        kind = "experts" if is_of_experts(row.megatron) else part_of(row.megatron).value
        rows.append((row, kind, row.replicated or any(name in row.megatron for name in _REPLICATED)))
    return tuple(rows)


def chunk_count(
    dims: Dimensions, split: ModelSplit, chunk: PipelineChunk, counted: Callable[[str], bool] | None = None
) -> Counter[str]:
    """Number of parameters that a rank holds of a chunk of the pipeline: of each part, and of experts separately.

    `counted` says of a row's Megatron name whether it is counted; None for all.
    """
    layers = {name: len(set(chunk.layers).intersection(dims.indices.get(name, ()))) for name in _LAYERS}
    counts = Counter[str]()
    for row, kind, replicated in _counted_rows(dims.family):
        if (counted and not counted(row.megatron)) or (row.condition is not None and not dims[row.condition]):
            continue
        if row.megatron == _EMBEDDING:
            # The stage with the output layer has a copy if the two are one weight.
            copies = int(chunk.pre_process or (chunk.post_process and not dims["untied"]))
        elif set(row.indices).intersection(_LAYERS):
            copies = 1
        else:  # rows of no text layer are with the tower, or after all layers
            copies = int(chunk.post_process if row.megatron.startswith("language_model.") else chunk.vision)
        for name in row.indices:
            if name in _LAYERS:
                copies *= layers[name]
            else:
                copies *= len(dims.indices[name]) // (split.ep if name == "experts" else 1)
        if copies:
            ranks = split.expert_tp if kind == "experts" else 1 if replicated else split.tp
            counts[kind] += copies * sum(math.prod(shape) for shape in row.numbers(dims)) // ranks
    return counts


def layers_by_kind(dims: Dimensions, layers: Iterable[int] | None = None) -> list[list[int]]:
    """Numbers of text layers by kind: linear or full attention, experts or none; None for all of the model's."""
    linear, moe = (set(dims.indices.get(name, ())) for name in ("linear_layers", "moe_layers"))
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for layer in dims.indices["text_layers"] if layers is None else layers:
        kinds.setdefault((layer in linear, layer in moe), []).append(layer)
    return list(kinds.values())


def adapter_sizes(dims: Dimensions, layer: int) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers of a text layer that have adapters, which experts' do not."""
    sizes = {}
    for row, kind, _ in _counted_rows(dims.family):
        name, _, parameter = row.megatron.rpartition(".")
        name = name.rpartition(".")[2]
        of_layer = any(layer in dims.indices[index] for index in row.indices if index in _LAYERS)
        if of_layer and kind != "experts" and name in LINEAR_LAYERS and parameter == "weight":
            outputs, inputs = row.megatron_shape(dims)
            sizes[name] = inputs, outputs
    return sizes


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank."""

    parameters: int  # weights, including frozen ones
    gradients: int  # of trained parameters
    optimizer: int  # its main copy of the weights, and the moments
    gathered: int  # under ZeRO-3, weights and gradients that are temporarily unsharded
    gathered_weights: int  # the layers' weights among them
    gathered_gradients: int  # the gradients among them
    gathered_layer: int  # those of one layer
    unsharded: int  # under Megatron-FSDP, before sharding: weights, which are created unsharded on each rank
    # While the optimizer steps and activations are freed: without Transformer Engine Adam is torch's
    # (`compat/optimizers.py`), which on a GPU holds the square roots of all second moments of a group of parameters at
    # once; with expert parallelism experts are a group, and all others one after it. Not with Megatron-FSDP, whose
    # parameters (DTensors) torch updates one by one. Source: torch 2.13, `optim/adam.py`,
    # `_default_to_fused_or_foreach`, `_multi_tensor_adam`.
    updating: int
    host_written: int  # on the host, while a checkpoint is saved: the rank's part of it
    # On the host too, if the optimizer's state is saved by parameters (`saved_by_parameters`): that of all parameters
    # of the rank, which every data-parallel rank gathers. Source: megatron-core 0.19,
    # `DistributedOptimizer.sharded_param_state_fully_reshardable`.
    host_gathered: int

    @property
    def total(self) -> int:
        """Total on the GPU in a step."""
        return self.parameters + self.gradients + self.optimizer + self.gathered

    @property
    def host_total(self) -> int:
        """Total on the host while a checkpoint is saved."""
        return self.host_written + self.host_gathered


def stage_states(
    dims: Dimensions, split: ModelSplit, chunks: tuple[PipelineChunk, ...], training: TrainingSettings
) -> ModelStates:
    """Bytes on a rank of the pipeline stage that has these chunks."""
    precision, sharding = training.precision, training.sharding
    held = sum((chunk_count(dims, split, chunk) for chunk in chunks), Counter())
    frozen = {part.value for part in training.frozen_weights}
    if Part.LANGUAGE_MODEL in training.frozen_weights:
        frozen.add("experts")
    trained = Counter({kind: number for kind, number in held.items() if kind not in frozen})
    if not training.trains_mtp:
        trained -= sum((chunk_count(dims, split, chunk, is_of_mtp) for chunk in chunks), Counter())
    if training.lora is not None:
        layers = [adapter_sizes(dims, layer) for chunk in chunks for layer in chunk.layers]
        adapted = [sizes[name] for sizes in layers for name in sizes.keys() & training.lora.targets]
        # Both matrices of an adapter are split over tensor-parallel ranks.
        numbers = training.lora.rank * sum(map(sum, adapted)) // split.tp
        magnitudes = sum(outputs for _, outputs in adapted) * training.lora.dora
        adapters = Counter(language_model=numbers + magnitudes)
        held, trained = held + adapters, trained + adapters

    # Ranks with the same weights, and with the same experts, share gradients and optimizer.
    weight_copies, expert_copies = split.dp * split.cp, split.world // (split.pp * split.ep * split.expert_tp)

    def sharded(count: Counter[str]) -> float:
        return (count.total() - count["experts"]) / weight_copies + count["experts"] / expert_copies

    def number(count: Counter[str], what: Sharding) -> float:
        return sharded(count) if sharding.shards(what) else count.total()

    outside, layer = _gathered_parameters(dims, split, chunks[0], held) if sharding is Sharding.ALL else (0, 0)
    # Those outside of layers are reduced when activations are freed.
    depth, ahead = sum(len(chunk.layers) for chunk in chunks), max(layer, 1)
    later, sooner = min(max(2, _REDUCED_LATER // ahead), depth), min(max(1, -(-_REDUCED_LATER // (2 * ahead))), depth)
    gathered_weights = precision.weight * layer * (1 + sooner)
    unsharded_gradient = precision.gradient * (training.lora is None)
    adam_by_torch = not training.transformer_engine and not sharding.is_fsdp
    experts = Counter(experts=trained["experts"])
    groups = (trained - experts, experts) if split.ep > 1 else (trained,)
    by_parameters = sharding is Sharding.OPTIMIZER and training.saved_by_parameters
    return ModelStates(
        parameters=round(precision.weight * number(held, Sharding.ALL) + _for_8_bits(dims, split, chunks, training)),
        gradients=round(precision.gradient * number(trained, Sharding.GRADIENTS)),
        optimizer=round((precision.main + precision.moments) * number(trained, Sharding.OPTIMIZER)),
        gathered=precision.weight * outside + gathered_weights + unsharded_gradient * layer * later,
        gathered_weights=gathered_weights,
        gathered_gradients=unsharded_gradient * layer * later,
        gathered_layer=unsharded_gradient * layer,
        # The embedding, the largest parameter, is there twice while it is sharded.
        unsharded=precision.weight
        * (held.total() + dims["vocab"] * dims["hidden"])
        * (sharding.is_fsdp and not training.made_on_host),
        updating=round(precision.moments / 2 * max(number(g, Sharding.OPTIMIZER) for g in groups) * adam_by_torch),
        host_written=round((precision.weight + STORED_BYTES) * sharded(trained)),
        host_gathered=STORED_BYTES * trained.total() * by_parameters,
    )


def _for_8_bits(
    dims: Dimensions, split: ModelSplit, chunks: tuple[PipelineChunk, ...], training: TrainingSettings
) -> float:
    """Bytes by which weights for products in 8 bits take more than in the model's precision."""
    if (bits := training.eight_bits) is None:
        return 0.0

    def counted(megatron: str) -> bool:
        *path, layer, parameter = megatron.rstrip("*").split(".")
        kinds = layer in LINEAR_LAYERS and layer not in bits.exempt and parameter == "weight"
        return kinds and path[:2] == ["language_model", "decoder"]

    depth = len(dims.indices["text_layers"])
    parts = [replace(chunk, layers=bits.layers(chunk.layers, depth)) for chunk in chunks]
    weights = sum(chunk_count(dims, split, part, counted).total() for part in parts)
    return weights * (bits.weight(training.precision.weight) - training.precision.weight)


def _gathered_parameters(
    dims: Dimensions, split: ModelSplit, chunk: PipelineChunk, held: Counter[str]
) -> tuple[int, int]:
    """Number of parameters outside of layers, whose weights are unsharded for the whole step under ZeRO-3, and of the
    largest layer's.
    """

    def count(name: str, **parts: Any) -> int:
        part = PipelineChunk(0, range(0), pre_process=False, post_process=False)
        return chunk_count(dims, split, replace(part, **parts), lambda megatron: name in megatron).total()

    mtp_layer = count(".mtp_model_layer.", post_process=True)
    in_layers = count("", layers=chunk.layers) + count("vision_model.decoder.layers.", vision=chunk.vision) + mtp_layer
    kinds = [count("", layers=range(layers[0], layers[0] + 1)) for layers in layers_by_kind(dims)]
    return held.total() - in_layers, max(mtp_layer, *kinds)
