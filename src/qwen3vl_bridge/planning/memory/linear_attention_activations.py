"""Activations that a layer of linear attention stores, by the rules of `language_activations.py`.

What lives here: the table, in numbers for each token of a context-parallel rank. Between its projections such a rank
has all tokens and its part of the heads, which is the same number. Standard library only. What may not: the MLP after
it, counts of layers (`microbatch_activations.py`).

There are two implementations, as for attention. The rule in torch (`linear_attention/delta_rule.py` of
`models/qwen3_5`) saves what autograd saves for each of its lines, including six matrices of chunk times chunk, and is
compared in tests; its chunks never have tokens of two segments, so that it has more slots than tokens. Kernels save
what their own functions save: the
convolution its input; the normalisation its result; the rule queries, keys, values, decays, strengths and the inverse
of each chunk's triangular system, and recompute the rest. Source: flash-linear-attention, `CausalConv1dFunction`,
`L2NormFunction`, `ChunkGatedDeltaRuleFunction`; not measured, for lack of a GPU. Transformer Engine's norm computes in
the dtype of its weight, which for the output is float32.
"""

from __future__ import annotations

from qwen3vl_bridge.models.common.flops import CHUNK
from qwen3vl_bridge.planning.memory.language_activations import INDEX, NORM, SavedTensor, Widths, norm
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.weights.dimensions import Dimensions

_FLOAT = 4  # bytes; dtype of the rule in torch, and of decays and the output's norm in all implementations


def linear_attention(n: Dimensions, split: Split, training: Training, slots: float = 1.0) -> list[SavedTensor]:
    """Linear attention of one layer, with the norm before it.

    Args:
        n, split, training: as everywhere.
        slots: of chunks, for each token; more than 1 if segments leave some empty.
    """
    w, e = Widths.of(n, split, training), training.precision.weight
    mixed, value, heads = (n[name] / split.tp for name in ("l_qkv", "l_value", "l_value_heads"))
    keys, key_heads = 2 * n["l_key"] / split.tp, 2 * n["l_key"] / n["l_key_dim"] / split.tp
    found = [
        *norm("norm before attention", w.hidden, 1 / split.sequence_ranks, w, training),
        SavedTensor("in_proj: input", w.hidden * e),
        SavedTensor("in_proj: output, which the convolution takes", (mixed + value + 2 * heads) * e),
        SavedTensor("decays: softplus", 2 * heads * _FLOAT),
        SavedTensor("writing strengths", heads * e),
        SavedTensor("out_proj: input", value * e),
    ]
    if not training.transformer_engine:
        return [
            *found,
            SavedTensor("convolution: earlier tokens", (n["l_conv"] - 1) * (mixed * e + 1)),
            SavedTensor("convolution: output", mixed * e),
            SavedTensor("queries and keys before their norm", (keys + key_heads) * _FLOAT),
            *_rule_in_torch(n, heads, slots),
            *norm("norm of the output", value, heads, w, training),
            SavedTensor("gate and what it becomes", 2 * value * _FLOAT),
            SavedTensor("norm of the output: result", value * e),
        ]
    return [
        *found,
        SavedTensor("queries and keys, normalised", keys * e + key_heads * NORM),
        SavedTensor("queries and keys of value heads", 2 * heads * n["l_key_dim"] * e),
        SavedTensor("values", value * e),
        SavedTensor("decays since the chunk began", heads * _FLOAT),
        SavedTensor("inverses of chunks' systems", heads * CHUNK * e),
        SavedTensor("norm of the output: input", value * _FLOAT),
        SavedTensor("norm of the output: statistic", heads * NORM),
        SavedTensor("norm of the output: result", value * _FLOAT),
        SavedTensor("gate", value * e),
    ]


def _rule_in_torch(n: Dimensions, heads: float, slots: float) -> list[SavedTensor]:
    """The gated delta rule line by line, in float32; numbers of a head and a slot."""
    key, value = n["l_key_dim"], n["l_value_dim"]
    numbers = {
        "decays, system, scores": 6 * CHUNK,
        "keys and queries": 10 * key,
        "values": 4 * value,
        "decays and strengths": 4 + 1 / CHUNK,
        "states": key * value / CHUNK,
    }
    rows = [SavedTensor(f"delta rule: {what}", heads * slots * number * _FLOAT) for what, number in numbers.items()]
    return [*rows, SavedTensor("delta rule: tokens in slots", slots * INDEX)]


def linear_attention_passing(n: Dimensions, split: Split, training: Training) -> float:
    """Bytes for each token while its backward pass runs: recomputed tensors of kernels, and gradients.

    For each head the chunk's updates and outputs, queries, keys and values with their gradients, and the states between
    chunks with theirs.
    """
    key, value = n["l_key_dim"], n["l_value_dim"]
    numbers = 4 * key + 4 * value + 2 * key * value / CHUNK
    return n["l_value_heads"] / split.tp * numbers * training.precision.weight
