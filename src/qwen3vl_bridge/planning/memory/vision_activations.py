"""Activations that the vision tower stores, for each patch that a rank encodes; and those of fusing.

What lives here: the tables, by the rules of `language_activations.py`. Standard library only. What may not: the number
of patches, recomputation of whole layers (`microbatch_activations.py`).

The tower is tensor-parallel like the language model, but not sequence-parallel: tensors between its linear layers are
whole on every rank.
"""

from __future__ import annotations

from qwen3vl_bridge.planning.communication import payload_numbers
from qwen3vl_bridge.planning.memory.language_activations import INDEX, LOG, SavedTensor
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.weights.dimensions import Dimensions


def vision_layer(n: Dimensions, split: Split, training: Training) -> list[SavedTensor]:
    """One layer of the tower."""
    e, v, f = training.precision.weight, n["v_hidden"], n["v_ffn"] / split.tp
    rotated, core = v / split.tp * e, frozenset({"core_attn"})
    statistics = 2 * _statistic(training)
    found = [
        SavedTensor("norm before attention: input", v * e),
        SavedTensor("linear_qkv: input", v * e),
        SavedTensor("queries and keys", 2 * rotated),
        SavedTensor("attention: logarithms", n["v_heads"] / split.tp * LOG, core),
        SavedTensor("linear_proj: input", rotated),
        SavedTensor("norm before MLP: input", v * e),
        SavedTensor("linear_fc1: input", v * e),
        SavedTensor("norms: statistics", 2 * statistics),
        SavedTensor("MLP: output of linear_fc1", f * e),
        SavedTensor("MLP: input of linear_fc2", f * e),
    ]
    if training.transformer_engine:
        return [*found, SavedTensor("values", rotated)]
    # Values are a view of the projection's output, and frames' outputs are concatenated.
    return [*found, SavedTensor("linear_qkv: output", 3 * rotated), SavedTensor("attention: output", rotated, core)]


def patches(n: Dimensions, training: Training) -> list[SavedTensor]:
    """Pixels, indices of positions, and the angles that all layers share."""
    pixels = n["v_channels"] * n["v_temporal_patch"] * n["v_patch"] ** 2
    e, head_dim = training.precision.weight, n["v_hidden"] // n["v_heads"]
    return [
        SavedTensor("pixels", pixels * e),
        SavedTensor("learned positions", 4 * (INDEX + e)),
        # Float32 in any precision: angles for Transformer Engine's kernel, otherwise their cosines and sines.
        SavedTensor("rotary angles", head_dim * 4 * (1 if training.transformer_engine else 2)),
    ]


def merger(n: Dimensions, split: Split, training: Training, *, after_shuffle: bool) -> list[SavedTensor]:
    """One merger. A DeepStack merger's input is a layer's input too, and kept there."""
    e, v = training.precision.weight, n["v_hidden"]
    joined = n["v_merged"] // v  # patches of a token
    statistic = 2 * _statistic(training)
    found = [
        SavedTensor("merger: linear_fc1 input", v * e),
        SavedTensor("merger: linear_fc1 output and linear_fc2 input", 2 * v / split.tp * e),
    ]
    if after_shuffle:
        return [*found, SavedTensor("merger: statistics", statistic / joined)]
    return [*found, SavedTensor("merger: norm input", v * e), SavedTensor("merger: statistics", statistic)]


def fused(n: Dimensions, training: Training) -> list[SavedTensor]:
    """For each vision token of a context-parallel rank: replacing its placeholder, with its index."""
    return [SavedTensor("vision tokens", n["hidden"] * training.precision.weight + 3 * INDEX)]


def payload(n: Dimensions, training: Training) -> list[SavedTensor]:
    """For each vision token of a replica, on both sides with separate vision ranks: the payload, which megatron-core's
    schedule keeps until the backward pass.
    """
    return [SavedTensor("sent between towers", payload_numbers(n) * training.precision.weight)]


def deepstack(n: Dimensions, split: Split, training: Training, received: int) -> list[SavedTensor]:
    """For each vision token of a context-parallel rank: the features that a chunk has received, for its own and later
    layers.
    """
    features = received * n["hidden"] * training.precision.weight
    return [SavedTensor("DeepStack features", (features + INDEX) / split.sequence_ranks)]


def _statistic(training: Training) -> int:
    """Torch's LayerNorm saves mean and deviation in the input's precision on a CPU."""
    return 4 if training.transformer_engine else training.precision.weight
