"""Activations that a layer of the language model stores for its backward pass: one row for each tensor that autograd
saves.

What lives here: the tables, in numbers for each token of a context-parallel rank. Standard library only. What may not:
counts of layers, recomputation of whole layers, pipelines (`microbatch_activations.py`); the vision tower
(`vision_activations.py`).

The method is that of Korthikanti et al. (arXiv 2205.05198): a linear layer and a norm save their input, a product its
factors. Their layer of a GPT saves 34 bytes for each number of the hidden state, without the attention matrix. Here
there is no dropout and its masks (2 bytes); attention saves queries, keys, values, its output and one number for each
head (Dao et al., arXiv 2205.14135); queries and keys have a norm and a rotation, and the MLP is gated.

There are two kinds of layers. Megatron-core's local ones, with our attention, are compared in tests with the tensors
that autograd saves. Transformer Engine's differ in the terms that are marked here: its norms save only their input, in
the model's precision, where torch's on a CPU also save the normalised input and compute in float32; values are copied
out of the projection of queries, keys and values; its attention's output is the next layer's input, where ours copies
packed rows; experts' tokens are permuted by a map.

Linear attention is counted in `linear_attention_activations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen3vl_bridge.planning.memory.parameters import adapter_widths
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.weights.dimensions import Dimensions

NORM, LOG, INDEX = 4, 4, 8  # bytes: of a statistic, of attention's log-sum-exp, of an index


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that is saved.

    Attributes:
        what: its description.
        nbytes: on a rank, for each token (or patch) of a context-parallel rank.
        freed_by: `recompute_modules` of which any one frees it.
    """

    what: str
    nbytes: float
    freed_by: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Widths:
    """Widths of the language model on one tensor-parallel rank.

    Attributes:
        hidden: between layers, where sequence parallelism splits tokens.
        q, kv, ffn: of queries, of keys, of the MLP.
        heads, groups: of queries and of keys.
        weight: bytes of a number.
        norm: bytes of a number inside of torch's norm.
    """

    hidden: float
    q: float
    kv: float
    ffn: float
    heads: float
    groups: float
    weight: int
    norm: int

    @classmethod
    def of(cls, n: Dimensions, split: Split, training: Training) -> Widths:
        """Those of a model on a rank."""
        groups = max(n["kv_heads"] / split.tp, 1.0)
        return cls(
            hidden=n["hidden"] / split.sequence_ranks,
            q=n["q"] / split.tp,
            kv=groups * n["head_dim"],
            ffn=n["ffn"] / split.tp,
            heads=n["heads"] / split.tp,
            groups=groups,
            weight=training.precision.weight,
            norm=training.precision.weight if training.transformer_engine else 4,
        )


def norm(what: str, numbers: float, groups: float, w: Widths, training: Training) -> list[SavedTensor]:
    """A norm over `groups` parts of `numbers` numbers: its input and statistic; torch's also saves the result before
    scaling.
    """
    found = [SavedTensor(f"{what}: input", numbers * w.norm), SavedTensor(f"{what}: statistic", groups * NORM)]
    if not training.transformer_engine:
        found.append(SavedTensor(f"{what}: normalised", numbers * w.norm))
    return found


def attention(n: Dimensions, split: Split, training: Training) -> list[SavedTensor]:
    """Self attention of one layer, with the norm before it."""
    w, e = Widths.of(n, split, training), training.precision.weight
    statistic = 1 / split.sequence_ranks
    core = frozenset({"core_attn"})
    found = [
        *norm("norm before attention", w.hidden, statistic, w, training),
        SavedTensor("linear_qkv: input", w.hidden * e),
        *norm("norm of queries", w.q, w.heads, w, training),
        *norm("norm of keys", w.kv, w.groups, w, training),
        SavedTensor("queries", w.q * e),
        SavedTensor("linear_proj: input", w.q * e),
        SavedTensor("attention: logarithms", w.heads * LOG, core),
    ]
    gates = "gated_q" in n.sizes  # of each query, which are a part of linear_qkv's output
    if gates:
        found.append(SavedTensor("attention: output before its gate", w.q * e))
        found.append(SavedTensor("gate", w.q * (e if training.transformer_engine else 4)))
    if training.transformer_engine:
        return [*found, SavedTensor("keys", w.kv * e), SavedTensor("values", w.kv * e)]
    if e == w.norm:  # norms of a part of linear_qkv's output save that, which is saved anyway
        parts = {"norm of keys: input"} | ({"norm of queries: input"} if w.groups == 1 else set())
        found = [row for row in found if row.what not in parts]
    # Ranks that share a group gather all groups and slice their own. Source: megatron-core 0.19, SelfAttention.
    cut = split.tp if split.tp <= n["kv_heads"] else 1
    found.append(SavedTensor("linear_qkv: output", ((1 + gates) * n["q"] + 2 * n["kv"]) / cut * e))
    if split.cp > 1:
        found.append(SavedTensor("keys and values of all context-parallel ranks", 2 * w.kv * e * split.cp))
    else:
        found.append(SavedTensor("keys", w.kv * e))
    if training.packed or split.cp > 1:
        found.append(SavedTensor("attention: output", w.q * e, core))
    return found


def gated(what: str, numbers: float, training: Training, freed: frozenset[str], *, weighed: bool) -> list[SavedTensor]:
    """SwiGLU between two linear layers of `numbers` inner numbers.

    Unfused, it saves the factors of each product: both halves, one of them activated, one with megatron-core's offset
    added; and the result, if it is weighted by the router.
    """
    e = training.precision.weight
    activation = freed | {"moe_act"} if weighed else freed
    found = [
        SavedTensor(f"{what}: output of linear_fc1", 2 * numbers * e, freed),
        SavedTensor(f"{what}: input of linear_fc2", numbers * e, activation),
    ]
    if not training.fused_activation:
        found.append(SavedTensor(f"{what}: factors", (2 + weighed) * numbers * e, activation))
    return found


def dense_mlp(n: Dimensions, split: Split, training: Training) -> list[SavedTensor]:
    """The MLP of a layer without experts, with the norm before it."""
    w, freed = Widths.of(n, split, training), frozenset({"mlp"})
    # Transformer Engine's norm is a part of linear_fc1, and is recomputed with it.
    inside = freed if training.transformer_engine else frozenset()
    return [
        *norm("norm before MLP", w.hidden, 1 / split.sequence_ranks, w, training),
        SavedTensor("linear_fc1: input", w.hidden * w.weight, inside),
        *gated("MLP", w.ffn, training, freed, weighed=False),
    ]


def experts(n: Dimensions, split: Split, training: Training, chosen: int) -> list[SavedTensor]:
    """The router and the experts of a layer, with the norm before them.

    Args:
        n, split, training: as everywhere.
        chosen: experts per token.
    """
    w, freed = Widths.of(n, split, training), frozenset({"moe"})
    token, number = 1 / split.sequence_ranks, n["experts"]
    # Expert-tensor-parallel ranks have each other's tokens, with a part of the width each.
    routed = chosen * token * training.expert_load
    seen = routed * split.expert_tp if split.expert_tp > 1 else routed
    scores = number * NORM * training.balancing_loss
    if training.transformer_engine:
        maps = 4 * (2 * number + 1)
    else:
        maps = (number + chosen) * INDEX
    return [
        *norm("norm before experts", w.hidden, token, w, training),
        SavedTensor("router: input", w.hidden * w.weight, frozenset({"layernorm"})),
        SavedTensor("router: choice", token * (chosen * (2 * INDEX + NORM) + scores + 1), freed),
        SavedTensor("experts: where tokens go", token * maps, freed),
        SavedTensor("experts: probabilities", seen * NORM, freed),
        SavedTensor("experts: linear_fc1 input", seen * n["hidden"] * w.weight, freed),
        *gated("experts", seen * n["moe_ffn"] / split.expert_tp, training, freed, weighed=True),
        *shared_expert(n, split, training, freed),
    ]


def shared_expert(n: Dimensions, split: Split, training: Training, freed: frozenset[str]) -> list[SavedTensor]:
    """The shared expert, and the gate of its output; its input is the router's."""
    if not (ffn := n.sizes.get("shared_ffn", 0)):
        return []
    w = Widths.of(n, split, training)
    return [
        *gated("shared expert", ffn / split.tp, training, freed, weighed=False),
        SavedTensor("shared expert: output", w.hidden * w.weight, freed),
        SavedTensor("shared expert: gate", w.weight / split.sequence_ranks, freed),
    ]


def adapters(n: Dimensions, training: Training, layer: int) -> list[SavedTensor]:
    """Between the two matrices of each adapter of a layer."""
    if training.lora is None:
        return []
    names = [name for name in adapter_widths(n, layer) if name in training.lora.targets]
    return [SavedTensor(f"adapter of {name}", training.lora.rank * training.precision.weight) for name in names]


def final_norm(n: Dimensions, split: Split, training: Training) -> list[SavedTensor]:
    """The norm after all layers."""
    w = Widths.of(n, split, training)
    return norm("norm at the end", w.hidden, 1 / split.sequence_ranks, w, training)


def head(n: Dimensions, split: Split, training: Training, *, in_chunks: bool = False) -> list[SavedTensor]:
    """The output layer and its losses, which save the softmax unless they are computed in chunks."""
    w = Widths.of(n, split, training)
    found = [SavedTensor("output_layer: input", w.hidden * w.weight)]
    if in_chunks:
        return [*found, SavedTensor("loss: labels", INDEX)]
    return [*found, softmax(n, split, training), SavedTensor("loss: labels", INDEX + 1)]


def next_tokens(n: Dimensions, split: Split, training: Training, *, arrived: bool) -> list[SavedTensor]:
    """Multi-token prediction around its layer: norms of hidden states and of embedded next tokens, the projection of
    both, and the norm after the layer.

    Args:
        n, split, training: as everywhere.
        arrived: next tokens were received from the previous stage, and are saved unchanged.
    """
    w, statistic = Widths.of(n, split, training), 1 / split.sequence_ranks
    found = [
        *norm("norm of next tokens", w.hidden, statistic, w, training),
        *norm("norm of hidden states", w.hidden, statistic, w, training),
        SavedTensor("eh_proj: input", 2 * w.hidden * w.weight),
        *norm("norm after multi-token prediction", w.hidden, statistic, w, training),
    ]
    if w.weight == w.norm:  # then a norm's input is no copy: hidden states are the output layer's input too
        parts = {"norm of hidden states: input"} | ({"norm of next tokens: input"} if arrived else set())
        found = [row for row in found if row.what not in parts]
        # The layer's input is a sequence-parallel part of what all ranks have gathered, which it saves.
        found.append(SavedTensor("eh_proj: output of other ranks' tokens", (n["hidden"] - w.hidden) * w.weight))
    return found


def weighed_losses() -> list[SavedTensor]:
    """The tensor that attaches the losses of multi-token prediction to the model's backward pass."""
    return [SavedTensor("loss mask", NORM), SavedTensor("losses, weighed", NORM)]


def softmax(n: Dimensions, split: Split, training: Training) -> SavedTensor:
    """The softmax of the loss in float32. Transformer Engine's own overwrites the logits with the gradient instead."""
    scores = training.precision.weight if training.fused_loss else 4
    return SavedTensor("loss: softmax", n["vocab"] / split.tp * scores)


def embedding(n: Dimensions, training: Training, *, first: bool) -> list[SavedTensor]:
    """The rotary angles that all layers share; token ids where they are embedded, and next tokens' if they are used.

    Transformer Engine's kernel takes angles in float32, the formula their cosines and sines in the heads' precision.
    """
    each = 4 if training.transformer_engine else 2 * training.precision.weight
    angles = SavedTensor("rotary angles", n["head_dim"] * each)
    return [angles, SavedTensor("token ids", INDEX * first * (1 + training.trains_mtp))]
