"""Count the parameters of one rank from the weight table, and the bytes of its model states.

Model states are weights, gradients and the optimizer's state on the GPU, and host memory while a checkpoint is saved
(`training/run_validation.py` compares it with the machine's). Mixed precision follows Micikevicius et al. (arXiv
1710.03740), sharding Rajbhandari et al. (ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from qwen3vl_bridge.planning.parallel_layout import ParallelLayout, PipelineChunk
from qwen3vl_bridge.planning.training_settings import LINEAR_LAYERS, NGRAM_TABLE, Sharding, TrainingSettings
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.hybrid_rows import ngram_head_sizes
from qwen3vl_bridge.weights.rows import Component, Dimensions, WeightRow, component_of, is_expert_layer, is_mtp

_EMBEDDING = "language_model.embedding.word_embeddings.weight"
# Parameters that tensor parallelism replicates, in addition to rows marked `replicated`: norms, the router, and biases
# of row-parallel layers. All others are divided along one dimension; which one does not change the count.
_REPLICATED = ("norm.", "_norm_", "mlp.router.", "linear_proj.bias", "linear_fc2.bias")
# Indices of the weight table that count text layers.
_LAYERS = ("text_layers", "dense_layers", "moe_layers", "linear_layers", "full_layers", "ple_layers")
# Kinds of parameters that are divided over EP * ETP ranks. They belong to the language model, and are frozen with it.
_SHARED_BY_EXPERT_RANKS = ("experts", NGRAM_TABLE)
# Under ZeRO-3: elements of unsharded gradients that wait to be reduced. Half as many weights are gathered in advance.
# Source: megatron-core 0.19, Megatron-FSDP's `suggested_communication_unit_size`.
_WAITING_GRADIENTS = 1_000_000_000
# Bytes of the optimizer per parameter in checkpoints: main copy and both moments in float32.
STORED_BYTES = 12


@functools.cache
def _counted_rows(family_name: str) -> tuple[tuple[WeightRow, str, bool], ...]:
    """Return (row, kind, replicated) for each row of the weight table of a family.

    `kind` is a value of `Component`, "experts" or "ngram_table". `replicated` is True if tensor parallelism does not
    shard the parameter.
    """
    rows = []
    for row in family(family_name).rows():
        kind = "experts" if is_expert_layer(row.megatron) else component_of(row.megatron).value
        kind = NGRAM_TABLE if "ngram_heads" in row.indices else kind
        rows.append((row, kind, row.replicated or any(name in row.megatron for name in _REPLICATED)))
    return tuple(rows)


def count_parameters(
    dims: Dimensions, layout: ParallelLayout, chunk: PipelineChunk, counted: Callable[[str], bool] | None = None
) -> Counter[str]:
    """Return the number of parameters of a pipeline chunk on one rank, by component.

    Experts and n-gram tables are counted separately. The hash heads of an n-gram table have slightly different numbers
    of rows; a rank is assumed to have an equal share of the table.

    Args:
        counted: function that returns True for the Megatron name of a parameter to count; None to count all.
    """
    layers = {name: len(set(chunk.layers).intersection(dims.indices.get(name, ()))) for name in _LAYERS}
    counts = Counter[str]()
    for row, kind, replicated in _counted_rows(dims.family):
        if (counted and not counted(row.megatron)) or (row.condition is not None and not dims[row.condition]):
            continue
        if row.megatron == _EMBEDDING:
            # With tied weights the stage of the output layer has a copy.
            copies = int(chunk.pre_process or (chunk.post_process and not dims["untied"]))
        elif set(row.indices).intersection(_LAYERS):
            copies = 1
        else:  # outside text layers: in the vision tower, or after the last text layer
            copies = int(chunk.post_process if row.megatron.startswith("language_model.") else chunk.vision)
        if kind == NGRAM_TABLE:
            counts[kind] += _table_parameters(dims, chunk) // (layout.ep * layout.expert_tp)
            continue
        for name in row.indices:
            if name in _LAYERS:
                copies *= layers[name]
            else:
                copies *= len(dims.indices[name]) // (layout.ep if name == "experts" else 1)
        if copies:
            ranks = layout.expert_tp if kind == "experts" else 1 if replicated else layout.tp
            counts[kind] += copies * sum(math.prod(shape) for shape in row.resolve_shapes(dims)) // ranks
    return counts


def _table_parameters(dims: Dimensions, chunk: PipelineChunk) -> int:
    """Return the number of parameters of all n-gram tables in a pipeline chunk."""
    return sum(
        dims["ngram_dim"] * sum(ngram_head_sizes(dims, index))
        for index, layer in enumerate(dims.indices["ple_layers"])
        if layer in chunk.layers
    )


def group_layers_by_kind(dims: Dimensions, layers: Iterable[int] | None = None) -> list[list[int]]:
    """Return lists of text-layer indices, one list for each kind of layer.

    Kinds differ in attention (full or linear), MLP (dense or experts), and n-gram embedding (with or without).

    Args:
        layers: indices of text layers; None for all.
    """
    of_kinds = [set(dims.indices.get(name, ())) for name in ("linear_layers", "moe_layers", "ple_layers")]
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for layer in dims.indices["text_layers"] if layers is None else layers:
        kinds.setdefault(tuple(layer in of_kind for of_kind in of_kinds), []).append(layer)
    return list(kinds.values())


def adapter_sizes(dims: Dimensions, layer: int) -> dict[str, tuple[int, int]]:
    """Return the input and output size of each linear layer in a text layer that can have an adapter, by layer name.

    Experts are excluded.
    """
    sizes = {}
    for row, kind, _ in _counted_rows(dims.family):
        name, _, parameter = row.megatron.rpartition(".")
        name = name.rpartition(".")[2]
        in_layer = any(layer in dims.indices[index] for index in row.indices if index in _LAYERS)
        if in_layer and kind not in _SHARED_BY_EXPERT_RANKS and name in LINEAR_LAYERS and parameter == "weight":
            outputs, inputs = row.megatron_shape(dims)
            sizes[name] = inputs, outputs
    return sizes


@dataclass(frozen=True)
class ModelStates:
    """Bytes of the model states (weights, gradients and optimizer state) on one rank."""

    parameters: int  # weights, including frozen ones
    gradients: int  # of trained parameters
    optimizer: int  # main copies of weights, and moments
    gathered: int  # ZeRO-3: temporarily unsharded weights and gradients
    gathered_weights: int  # weights of layers in `gathered`
    gathered_gradients: int  # gradients in `gathered`
    gathered_layer: int  # gradients of one layer in `gathered`
    before_sharding: int  # Megatron-FSDP: the complete weights, which each rank creates before they are sharded
    # Temporary memory of torch's Adam, which runs without Transformer Engine (`upstream/adam.py`). On a GPU it holds
    # the square roots of all second moments of a parameter group. With expert parallelism experts are a group of their
    # own. It updates Megatron-FSDP's parameters (DTensors) one by one. Source: torch 2.13, `optim/adam.py`,
    # `_default_to_fused_or_foreach`, `_multi_tensor_adam`.
    optimizer_temporary: int
    host_written: int  # host memory while a checkpoint is saved: the rank's shard
    # Host memory with `dist_ckpt_optim_fully_reshardable`: every data-parallel rank gathers the optimizer's state of
    # all its parameters. Source: megatron-core 0.19, `DistributedOptimizer.sharded_param_state_fully_reshardable`.
    host_gathered: int

    @property
    def total(self) -> int:
        """Total bytes of model states on the GPU during a training step."""
        return self.parameters + self.gradients + self.optimizer + self.gathered

    @property
    def host_total(self) -> int:
        """Total bytes of host memory that saving a checkpoint needs."""
        return self.host_written + self.host_gathered


def estimate_states(
    dims: Dimensions, layout: ParallelLayout, chunks: tuple[PipelineChunk, ...], training: TrainingSettings
) -> ModelStates:
    """Estimate the model states of a rank that holds the pipeline chunks `chunks`."""
    precision, sharding = training.precision, training.sharding
    held = sum((count_parameters(dims, layout, chunk) for chunk in chunks), Counter())
    # Bytes of n-gram tables in FP8. They are buffers, which are complete on each rank and never gathered.
    buffers = held.pop(NGRAM_TABLE, 0) if training.fp8_ngram_table else 0
    frozen = {part.value for part in training.frozen_weights}
    if Component.LANGUAGE_MODEL in training.frozen_weights:
        frozen.update(_SHARED_BY_EXPERT_RANKS)
    if training.freezes_ngram_table:
        frozen.add(NGRAM_TABLE)

    def is_never_trained(megatron: str) -> bool:
        """Return True for multi-token prediction without its loss, and for indexers, which get no gradient."""
        return (is_mtp(megatron) and not training.trains_mtp) or ".indexer." in megatron

    trained = Counter({kind: number for kind, number in held.items() if kind not in frozen})
    trained -= sum((count_parameters(dims, layout, chunk, is_never_trained) for chunk in chunks), Counter())
    if training.lora is not None:
        layers = [adapter_sizes(dims, layer) for chunk in chunks for layer in chunk.layers]
        adapted = [sizes[name] for sizes in layers for name in sizes.keys() & training.lora.targets]
        # Tensor parallelism divides both matrices of an adapter.
        numbers = training.lora.rank * sum(map(sum, adapted)) // layout.tp
        magnitudes = sum(outputs for _, outputs in adapted) * training.lora.dora
        adapters = Counter(language_model=numbers + magnitudes)
        held, trained = held + adapters, trained + adapters

    # Ranks with the same weights (for experts: with the same experts) share gradients and optimizer state.
    copies, expert_copies = layout.dp * layout.cp, layout.world // (layout.pp * layout.ep * layout.expert_tp)
    # An n-gram table that is not divided over ranks is an ordinary parameter.
    like_experts = _SHARED_BY_EXPERT_RANKS if layout.ep * layout.expert_tp > 1 else ("experts",)

    def number_like_experts(count: Counter[str]) -> int:
        return sum(count[kind] for kind in like_experts)

    def shard(count: Counter[str]) -> float:
        experts = number_like_experts(count)
        return (count.total() - experts) / copies + experts / expert_copies

    def number(count: Counter[str], stage: Sharding) -> float:
        return shard(count) if sharding.includes(stage) else count.total()

    outside, layer = 0, 0
    if sharding is Sharding.ALL:
        outside, layer = _gathered_parameters(dims, layout, chunks[0], held, with_table=not training.fp8_ngram_table)
    # Gradients outside the layers are reduced when activations are freed, so only those of layers count.
    depth, per_layer = sum(len(chunk.layers) for chunk in chunks), max(layer, 1)
    # A layer's gradients are allocated when what it computed with is freed, so those of two layers count at least.
    waiting = min(max(2, _WAITING_GRADIENTS // per_layer), depth)
    in_advance = min(max(1, -(-_WAITING_GRADIENTS // (2 * per_layer))), depth)
    gathered_weights = precision.weight * layer * (1 + in_advance)
    unsharded_gradient = precision.gradient * (training.lora is None)
    torch_adam = not training.transformer_engine and not sharding.is_fsdp
    experts = Counter({kind: trained[kind] for kind in like_experts})
    groups = (trained - experts, experts) if layout.ep > 1 else (trained,)
    gathers_optimizer = sharding is Sharding.OPTIMIZER and training.fully_reshardable
    return ModelStates(
        parameters=round(
            buffers
            + precision.weight * number(held, Sharding.ALL)
            + _additional_fp8_bytes(dims, layout, chunks, training)
        ),
        gradients=round(precision.gradient * number(trained, Sharding.GRADIENTS)),
        optimizer=round((precision.main + precision.moments) * number(trained, Sharding.OPTIMIZER)),
        gathered=precision.weight * outside + gathered_weights + unsharded_gradient * layer * waiting,
        gathered_weights=gathered_weights,
        gathered_gradients=unsharded_gradient * layer * waiting,
        gathered_layer=unsharded_gradient * layer,
        # While the embedding, the largest parameter, is sharded, there are two copies.
        before_sharding=(buffers + precision.weight * (held.total() + dims["vocab"] * dims["hidden"]))
        * (sharding.is_fsdp and not training.init_on_cpu),
        optimizer_temporary=round(
            precision.moments / 2 * max(number(group, Sharding.OPTIMIZER) for group in groups) * torch_adam
        ),
        host_written=round((precision.weight + STORED_BYTES) * shard(trained)),
        host_gathered=STORED_BYTES * trained.total() * gathers_optimizer,
    )


def _additional_fp8_bytes(
    dims: Dimensions, layout: ParallelLayout, chunks: tuple[PipelineChunk, ...], training: TrainingSettings
) -> float:
    """Return the bytes that weights take in FP8, minus the bytes that they would take in the model's precision."""
    if (fp8 := training.fp8) is None:
        return 0.0

    def is_fp8(megatron: str) -> bool:
        *path, layer, parameter = megatron.rstrip("*").split(".")
        in_fp8 = layer in LINEAR_LAYERS and layer not in fp8.bf16_linears and parameter == "weight"
        return in_fp8 and path[:2] == ["language_model", "decoder"]

    depth = len(dims.indices["text_layers"])
    fp8_chunks = [replace(chunk, layers=fp8.select_layers(chunk.layers, depth)) for chunk in chunks]
    weights = sum(count_parameters(dims, layout, chunk, is_fp8).total() for chunk in fp8_chunks)
    return weights * (fp8.weight_bytes(training.precision.weight) - training.precision.weight)


def _gathered_parameters(
    dims: Dimensions, layout: ParallelLayout, chunk: PipelineChunk, held: Counter[str], *, with_table: bool
) -> tuple[int, int]:
    """Return (number of parameters outside of layers, number of parameters of the largest layer) on one rank.

    Under ZeRO-3 weights outside of layers are unsharded during a step. `held` are the parameters of `chunk` by
    component. `with_table` says whether n-gram tables are parameters.
    """

    def count(name: str, **fields: Any) -> int:
        empty = PipelineChunk(0, range(0), pre_process=False, post_process=False)
        counts = count_parameters(dims, layout, replace(empty, **fields), lambda megatron: name in megatron)
        return counts.total() - (0 if with_table else counts[NGRAM_TABLE])

    mtp_layer = count(".mtp_model_layer.", post_process=True)
    in_layers = count("", layers=chunk.layers) + count("vision_model.decoder.layers.", vision=chunk.vision) + mtp_layer
    kinds = [count("", layers=range(layers[0], layers[0] + 1)) for layers in group_layers_by_kind(dims)]
    return held.total() - in_layers, max(mtp_layer, *kinds)
