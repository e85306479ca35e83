"""Activations that one microbatch stores on a rank for its backward pass: a row for each tensor that autograd saves, in
bytes for each token or patch; then their sums over a part of the pipeline, with recomputation.

The method is that of Korthikanti et al. (arXiv 2205.05198): a linear layer and a norm save their input, a product its
factors. Their layer of a GPT saves 34 bytes for each number of the hidden state, without the attention matrix. Here
there is no dropout and its masks (2 bytes); attention saves queries, keys, values, its output and one number for each
head (Dao et al., arXiv 2205.14135); queries and keys have a norm and a rotation, and the MLP is gated.

There are two kinds of layers. Megatron-core's local ones, with our attention, are compared in tests with the tensors
that autograd saves. Transformer Engine's differ in the terms that are marked here: its norms save only their input, in
the model's precision, where torch's on a CPU also save the normalised input and compute in float32; values are copied
out of the projection of queries, keys and values; its attention's output is the next layer's input, where ours copies
packed rows; experts' tokens are permuted by a map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qwen3vl_bridge.models.flops import CHUNK
from qwen3vl_bridge.planning.model_states import adapter_sizes, layers_by_kind
from qwen3vl_bridge.planning.split import ModelSplit, PipelineChunk
from qwen3vl_bridge.planning.training_settings import Recompute, TrainingSettings
from qwen3vl_bridge.weights.rows import Dimensions, Part

# Bytes: of a norm's statistic, of attention's log-sum-exp, of an index, of a float32 number in any precision.
_STATISTIC, _LOGSUMEXP, _INDEX, _FLOAT = 4, 4, 8, 4


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that is saved.

    Attributes:
        name: its description.
        nbytes: on a rank, for each token (or patch) of a context-parallel rank.
        freed_by: `recompute_modules` of which any one frees it.
    """

    name: str
    nbytes: float
    freed_by: frozenset[str] = frozenset()


def _total(rows: Sequence[SavedTensor]) -> float:
    return math.fsum(row.nbytes for row in rows)


@dataclass(frozen=True)
class TextWidths:
    """Widths of the language model on one tensor-parallel rank.

    Attributes:
        hidden: between layers, where sequence parallelism splits tokens.
        q, kv, ffn: of queries, of keys, of the MLP.
        heads, groups: numbers of queries and of keys.
        token: 1, or a rank's part of a token with sequence parallelism.
    """

    hidden: float
    q: float
    kv: float
    ffn: float
    heads: float
    groups: float
    token: float

    @classmethod
    def of(cls, dims: Dimensions, split: ModelSplit) -> TextWidths:
        """Those of a model on a rank."""
        groups = max(dims["kv_heads"] / split.tp, 1.0)
        return cls(
            hidden=dims["hidden"] / split.sequence_ranks,
            q=dims["q"] / split.tp,
            kv=groups * dims["head_dim"],
            ffn=dims["ffn"] / split.tp,
            heads=dims["heads"] / split.tp,
            groups=groups,
            token=1 / split.sequence_ranks,
        )


# The language model, for each token of a context-parallel rank. `e` is the bytes of a number.


def norm(name: str, numbers: float, groups: float, training: TrainingSettings) -> list[SavedTensor]:
    """A norm over `groups` parts of `numbers` numbers: its input and statistic; torch's also saves the result before
    scaling.
    """
    e = training.precision.weight if training.transformer_engine else _FLOAT
    rows = [SavedTensor(f"{name}: input", numbers * e), SavedTensor(f"{name}: statistic", groups * _STATISTIC)]
    return rows if training.transformer_engine else [*rows, SavedTensor(f"{name}: normalised", numbers * e)]


def attention(dims: Dimensions, split: ModelSplit, training: TrainingSettings) -> list[SavedTensor]:
    """Self attention of one layer, with the norm before it."""
    w, e, core_attn = TextWidths.of(dims, split), training.precision.weight, frozenset({"core_attn"})
    rows = [
        *norm("norm before attention", w.hidden, w.token, training),
        SavedTensor("linear_qkv: input", w.hidden * e),
        *norm("norm of queries", w.q, w.heads, training),
        *norm("norm of keys", w.kv, w.groups, training),
        SavedTensor("queries", w.q * e),
        SavedTensor("linear_proj: input", w.q * e),
        SavedTensor("attention: log-sum-exp", w.heads * _LOGSUMEXP, core_attn),
    ]
    gated = "gated_q" in dims.sizes  # by a gate of each query, which is a part of linear_qkv's output
    if gated:
        rows.append(SavedTensor("attention: output before its gate", w.q * e))
        rows.append(SavedTensor("gate", w.q * (e if training.transformer_engine else _FLOAT)))
    if training.transformer_engine:
        return [*rows, SavedTensor("keys", w.kv * e), SavedTensor("values", w.kv * e)]
    if e == _FLOAT:  # norms of a part of linear_qkv's output save that, which is saved anyway
        parts = {"norm of keys: input"} | ({"norm of queries: input"} if w.groups == 1 else set())
        rows = [row for row in rows if row.name not in parts]
    # Ranks that share a group gather all groups and slice their own. Source: megatron-core 0.19, SelfAttention.
    parts_of_output = split.tp if split.tp <= dims["kv_heads"] else 1
    output = ((1 + gated) * dims["q"] + 2 * dims["kv"]) / parts_of_output * e
    rows.append(SavedTensor("linear_qkv: output", output))
    if split.cp > 1:
        rows.append(SavedTensor("keys and values of all context-parallel ranks", 2 * w.kv * e * split.cp))
    else:
        rows.append(SavedTensor("keys", w.kv * e))
    if training.packed or split.cp > 1:
        rows.append(SavedTensor("attention: output", w.q * e, core_attn))
    return rows


def linear_attention(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, slots: float = 1.0
) -> list[SavedTensor]:
    """Linear attention of one layer, with the norm before it.

    Between its projections a context-parallel rank has all tokens and its part of the heads, which is the same number.
    The delta rule in torch saves what autograd saves for each of its lines, and is compared in tests; its chunks never
    have tokens of two segments, so that it has more slots than tokens. With Transformer Engine, kernels save what their
    own functions save, and recompute the rest. Source: flash-linear-attention, `CausalConv1dFunction`,
    `L2NormFunction`, `ChunkGatedDeltaRuleFunction`; not measured, for lack of a GPU.

    Args:
        dims, split, training: as everywhere.
        slots: of chunks, for each token; more than 1 if segments leave some empty.
    """
    w, e = TextWidths.of(dims, split), training.precision.weight
    qkv, value, heads = (dims[name] / split.tp for name in ("l_qkv", "l_value", "l_value_heads"))
    # Queries and keys together.
    keys, key_heads = 2 * dims["l_key"] / split.tp, 2 * dims["l_key"] / dims["l_key_dim"] / split.tp
    rows = [
        *norm("norm before attention", w.hidden, w.token, training),
        SavedTensor("in_proj: input", w.hidden * e),
        SavedTensor("in_proj: output, which the convolution takes", (qkv + value + 2 * heads) * e),
        SavedTensor("decays: softplus", 2 * heads * _FLOAT),
        SavedTensor("writing strengths", heads * e),
        SavedTensor("out_proj: input", value * e),
    ]
    if training.transformer_engine:
        return [
            *rows,
            SavedTensor("queries and keys, normalised", keys * e + key_heads * _STATISTIC),
            SavedTensor("queries and keys of value heads", 2 * heads * dims["l_key_dim"] * e),
            SavedTensor("values", value * e),
            SavedTensor("decays since the chunk began", heads * _FLOAT),
            SavedTensor("inverses of chunks' systems", heads * CHUNK * e),
            # Transformer Engine's norm computes in the dtype of its weight, which is float32 here.
            SavedTensor("norm of the output: input", value * _FLOAT),
            SavedTensor("norm of the output: statistic", heads * _STATISTIC),
            SavedTensor("norm of the output: result", value * _FLOAT),
            SavedTensor("gate", value * e),
        ]
    key_dim, value_dim = dims["l_key_dim"], dims["l_value_dim"]
    rule = {  # line by line in float32: numbers of a head and a slot
        "decays, system, scores": 6 * CHUNK,
        "keys and queries": 10 * key_dim,
        "values": 4 * value_dim,
        "decays and strengths": 4 + 1 / CHUNK,
        "states": key_dim * value_dim / CHUNK,
    }
    return [
        *rows,
        SavedTensor("convolution: earlier tokens", (dims["l_conv"] - 1) * (qkv * e + 1)),
        SavedTensor("convolution: output", qkv * e),
        SavedTensor("queries and keys before their norm", (keys + key_heads) * _FLOAT),
        *(SavedTensor(f"delta rule: {name}", heads * slots * count * _FLOAT) for name, count in rule.items()),
        SavedTensor("delta rule: tokens in slots", slots * _INDEX),
        *norm("norm of the output", value, heads, training),
        SavedTensor("gate and its activation", 2 * value * _FLOAT),
        SavedTensor("norm of the output: result", value * e),
    ]


def gated_mlp(
    name: str, width: float, training: TrainingSettings, freed_by: frozenset[str], *, weighted: bool = False
) -> list[SavedTensor]:
    """SwiGLU between two linear layers of inner size `width`.

    Unfused, it saves the factors of each product: both halves, one of them activated, one with megatron-core's offset
    added; and the result, if it is weighted by the router.
    """
    e = training.precision.weight
    activation = freed_by | {"moe_act"} if weighted else freed_by
    rows = [
        SavedTensor(f"{name}: output of linear_fc1", 2 * width * e, freed_by),
        SavedTensor(f"{name}: input of linear_fc2", width * e, activation),
    ]
    if not training.fused_activation:
        rows.append(SavedTensor(f"{name}: factors", (2 + weighted) * width * e, activation))
    return rows


def dense_mlp(dims: Dimensions, split: ModelSplit, training: TrainingSettings) -> list[SavedTensor]:
    """The MLP of a layer without experts, with the norm before it."""
    w, e, mlp = TextWidths.of(dims, split), training.precision.weight, frozenset({"mlp"})
    # Transformer Engine's norm is a part of linear_fc1, and is recomputed with it.
    input_freed_by = mlp if training.transformer_engine else frozenset()
    return [
        *norm("norm before MLP", w.hidden, w.token, training),
        SavedTensor("linear_fc1: input", w.hidden * e, input_freed_by),
        *gated_mlp("MLP", w.ffn, training, mlp),
    ]


def moe_mlp(dims: Dimensions, split: ModelSplit, training: TrainingSettings) -> list[SavedTensor]:
    """The router, the experts and the shared expert of a layer, with the norm before them."""
    w, e, moe = TextWidths.of(dims, split), training.precision.weight, frozenset({"moe"})
    topk, experts = dims["topk"], dims["experts"]
    # Expert-tensor-parallel ranks have each other's tokens, with a part of the width each.
    routed = topk * w.token * training.expert_load * split.expert_tp
    scores = experts * _STATISTIC * training.balancing_loss
    permutation = 4 * (2 * experts + 1) if training.transformer_engine else (experts + topk) * _INDEX
    rows = [
        *norm("norm before experts", w.hidden, w.token, training),
        SavedTensor("router: input", w.hidden * e, frozenset({"layernorm"})),
        SavedTensor("router: top k", w.token * (topk * (2 * _INDEX + _STATISTIC) + scores + 1), moe),
        SavedTensor("experts: permutation of tokens", w.token * permutation, moe),
        SavedTensor("experts: probabilities", routed * _STATISTIC, moe),
        SavedTensor("experts: linear_fc1 input", routed * dims["hidden"] * e, moe),
        *gated_mlp("experts", routed * dims["moe_ffn"] / split.expert_tp, training, moe, weighted=True),
    ]
    if ffn := dims.sizes.get("shared_ffn", 0):  # the input of the shared expert is the router's
        rows += [
            *gated_mlp("shared expert", ffn / split.tp, training, moe),
            SavedTensor("shared expert: output", w.hidden * e, moe),
            SavedTensor("shared expert: gate", e * w.token, moe),
        ]
    return rows


def output_layer(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, *, in_chunks: bool
) -> list[SavedTensor]:
    """The output layer and its losses, which save the softmax unless they are computed in chunks."""
    e = training.precision.weight
    rows = [SavedTensor("output_layer: input", TextWidths.of(dims, split).hidden * e)]
    if in_chunks:
        return [*rows, SavedTensor("loss: labels", _INDEX)]
    return [*rows, softmax(dims, split, training), SavedTensor("loss: labels", _INDEX + 1)]


def softmax(dims: Dimensions, split: ModelSplit, training: TrainingSettings) -> SavedTensor:
    """The softmax of the loss in float32. Transformer Engine's own overwrites the logits with the gradient instead."""
    scores = training.precision.weight if training.fused_loss else _FLOAT
    return SavedTensor("loss: softmax", dims["vocab"] / split.tp * scores)


def embedding(dims: Dimensions, training: TrainingSettings, *, pre_process: bool) -> list[SavedTensor]:
    """The rotary angles that all layers share; token ids where they are embedded, and next tokens' if they are used.

    Transformer Engine's kernel takes angles in float32, the formula their cosines and sines in the heads' precision.
    """
    each = _FLOAT if training.transformer_engine else 2 * training.precision.weight
    return [
        SavedTensor("rotary angles", dims["head_dim"] * each),
        SavedTensor("token ids", _INDEX * pre_process * (1 + training.trains_mtp)),
    ]


def mtp_inputs(dims: Dimensions, split: ModelSplit, training: TrainingSettings, *, received: bool) -> list[SavedTensor]:
    """Multi-token prediction around its layer: norms of hidden states and of embedded next tokens, the projection of
    both, and the norm after the layer.

    Args:
        dims, split, training: as everywhere.
        received: next tokens were received from the previous stage, and are saved unchanged.
    """
    w, e = TextWidths.of(dims, split), training.precision.weight
    rows = [
        *norm("norm of next tokens", w.hidden, w.token, training),
        *norm("norm of hidden states", w.hidden, w.token, training),
        SavedTensor("eh_proj: input", 2 * w.hidden * e),
        *norm("norm after multi-token prediction", w.hidden, w.token, training),
    ]
    if (
        training.transformer_engine or e == _FLOAT
    ):  # then a norm's input is no copy: hidden states are the output layer's input too
        parts = {"norm of hidden states: input"} | ({"norm of next tokens: input"} if received else set())
        rows = [row for row in rows if row.name not in parts]
        # The layer's input is a sequence-parallel part of what all ranks have gathered, which it saves.
        rows.append(SavedTensor("eh_proj: output of other ranks' tokens", (dims["hidden"] - w.hidden) * e))
    return rows


# The vision tower, for each patch that a rank encodes. It is tensor-parallel like the language model, but not
# sequence-parallel: tensors between its linear layers are not divided over the ranks.


def vision_layer(dims: Dimensions, split: ModelSplit, training: TrainingSettings) -> list[SavedTensor]:
    """One layer of the vision tower."""
    e, hidden, ffn = training.precision.weight, dims["v_hidden"], dims["v_ffn"] / split.tp
    heads, core_attn = hidden / split.tp * e, frozenset({"core_attn"})
    rows = [
        SavedTensor("norm before attention: input", hidden * e),
        SavedTensor("linear_qkv: input", hidden * e),
        SavedTensor("queries and keys", 2 * heads),
        SavedTensor("attention: log-sum-exp", dims["v_heads"] / split.tp * _LOGSUMEXP, core_attn),
        SavedTensor("linear_proj: input", heads),
        SavedTensor("norm before MLP: input", hidden * e),
        SavedTensor("linear_fc1: input", hidden * e),
        SavedTensor("norms: statistics", 4 * _layer_norm_statistic(training)),
        SavedTensor("MLP: output of linear_fc1", ffn * e),
        SavedTensor("MLP: input of linear_fc2", ffn * e),
    ]
    if training.transformer_engine:
        return [*rows, SavedTensor("values", heads)]
    # Values are a view of the projection's output, and frames' outputs are concatenated.
    return [*rows, SavedTensor("linear_qkv: output", 3 * heads), SavedTensor("attention: output", heads, core_attn)]


def patch_inputs(dims: Dimensions, training: TrainingSettings) -> list[SavedTensor]:
    """Pixels, indices of positions, and the angles that all layers share."""
    pixels = dims["v_channels"] * dims["v_temporal_patch"] * dims["v_patch"] ** 2
    e, head_dim = training.precision.weight, dims["v_hidden"] // dims["v_heads"]
    return [
        SavedTensor("pixels", pixels * e),
        SavedTensor("learned positions", 4 * (_INDEX + e)),
        # Float32 in any precision: angles for Transformer Engine's kernel, otherwise their cosines and sines.
        SavedTensor("rotary angles", head_dim * _FLOAT * (1 if training.transformer_engine else 2)),
    ]


def merger(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, *, after_shuffle: bool
) -> list[SavedTensor]:
    """One merger. A DeepStack merger's input is a layer's input too, and saved there."""
    e, hidden, patches_per_token = training.precision.weight, dims["v_hidden"], dims["v_merged"] // dims["v_hidden"]
    statistics = 2 * _layer_norm_statistic(training)
    rows = [
        SavedTensor("merger: linear_fc1 input", hidden * e),
        SavedTensor("merger: linear_fc1 output and linear_fc2 input", 2 * hidden / split.tp * e),
    ]
    if after_shuffle:
        return [*rows, SavedTensor("merger: statistics", statistics / patches_per_token)]
    return [*rows, SavedTensor("merger: norm input", hidden * e), SavedTensor("merger: statistics", statistics)]


def _layer_norm_statistic(training: TrainingSettings) -> int:
    """Torch's LayerNorm saves mean and deviation in the input's precision on a CPU."""
    return _STATISTIC if training.transformer_engine else training.precision.weight


# One microbatch in a part of the pipeline.


@dataclass(frozen=True)
class MicrobatchWork:
    """One microbatch on one rank.

    Attributes:
        tokens: of its context-parallel part.
        patches: number that it encodes.
        vision_tokens: vision tokens among `tokens`.
        slots: of linear attention's chunks, for each token, if torch computes it; kernels leave none empty.
    """

    tokens: float
    patches: float
    vision_tokens: float
    slots: float = 1.0

    @classmethod
    def of(cls, dims: Dimensions, split: ModelSplit, training: TrainingSettings) -> MicrobatchWork:
        """The maximum for full rows; images are assumed to be divided evenly over context-parallel ranks.

        A row without images has a blank one of a single vision token, and so has a rank without images.
        """
        patches_per_token = dims["v_merged"] // dims["v_hidden"]
        patches = patches_per_token * training.seq_length
        if training.max_patches is not None:
            patches = min(training.max_patches, patches)
        tokens, patches = (training.micro_batch_size * size / split.cp for size in (training.seq_length, patches))
        return cls(tokens, max(patches, patches_per_token), patches / patches_per_token)


@dataclass(frozen=True)
class Activations:
    """Bytes of one microbatch in one chunk of the pipeline.

    Attributes:
        stored: until its backward pass, by module.
        temporary: maximum while a layer is computed: recomputed activations, gradients of a layer, logits.
    """

    stored: dict[str, float]
    temporary: float

    @property
    def total(self) -> float:
        """Total of `stored`."""
        return sum(self.stored.values())


@dataclass(frozen=True)
class LayerActivations:
    """A layer for recomputation, in bytes for each token or patch.

    Attributes:
        rows: tensors that it saves.
        input: its input, the only saved tensor if the complete layer is recomputed.
        gradients: of its widest tensors, while its backward pass runs.
    """

    rows: tuple[SavedTensor, ...]
    input: float
    gradients: float

    @property
    def total(self) -> float:
        """Without recomputation."""
        return sum(row.nbytes for row in self.rows)

    def freed(self, modules: frozenset[str]) -> float:
        """What recomputing these modules frees."""
        return sum(row.nbytes for row in self.rows if row.freed_by & modules)


def chunk_activations(
    dims: Dimensions,
    split: ModelSplit,
    training: TrainingSettings,
    chunk: PipelineChunk,
    work: MicrobatchWork | None = None,
) -> Activations:
    """Activations that one microbatch stores in a chunk.

    Args:
        dims: the model's dimensions.
        split: parallel sizes.
        training: rows, precision, recomputation.
        chunk: of the pipeline.
        work: tokens and patches; None for full rows.
    """
    work = work or MicrobatchWork.of(dims, split, training)
    e, hidden, deepstack_layers = training.precision.weight, dims["hidden"], len(dims.indices["deepstack_mergers"])
    layers = _text_layers(dims, split, training, chunk, work.slots)
    text, temporary = _with_recomputation(layers, training.recompute)
    embedded = _total(embedding(dims, training, pre_process=chunk.pre_process))
    stored = {"language model": text * work.tokens + embedded * work.tokens}
    temporary *= work.tokens
    if training.trains_mtp:
        mtp, mtp_temporary = _multi_token_prediction(dims, split, training, chunk, work.tokens)
        stored["multi-token prediction"] = mtp * work.tokens
        temporary = max(temporary, mtp_temporary * work.tokens)
    # Features of DeepStack layers that the chunk has received, for its own and later layers.
    if chunk.layers and (received := deepstack_layers - chunk.layers.start) > 0:
        stored["DeepStack"] = (received * hidden * e + _INDEX) / split.sequence_ranks * work.vision_tokens
    if chunk.vision:
        tower, mergers, tower_temporary = _vision_tower(dims, split, training)
        stored["vision model"], stored["vision projection"] = tower * work.patches, mergers * work.patches
        temporary = max(temporary, tower_temporary * work.patches)
    vision_trained = not training.frozen_weights >= {Part.VISION_MODEL, Part.VISION_PROJECTION}
    if chunk.pre_process and vision_trained:  # each vision token replaces its placeholder, with its index
        replaced = (hidden * e + 3 * _INDEX) * work.vision_tokens * (1 + training.trains_mtp)
        stored["vision projection"] = stored.get("vision projection", 0.0) + replaced
    if chunk.post_process:
        w, in_chunks = TextWidths.of(dims, split), training.loss_in_chunks(work.tokens)
        final_norm = norm("final norm", w.hidden, w.token, training)
        head = output_layer(dims, split, training, in_chunks=in_chunks)
        stored["loss"] = _total([*final_norm, *head]) * work.tokens
        temporary = max(temporary, _loss_temporary(dims, split, training, work.tokens))
    if chunk.pre_process != chunk.vision:
        # With separate vision ranks both sides keep what is sent, embeddings and DeepStack features of all vision
        # tokens of a replica, until the backward pass: megatron-core's schedule does. Then there is its gradient too.
        stored["sent between towers"] = (1 + deepstack_layers) * hidden * e * work.vision_tokens * split.cp
        temporary += stored["sent between towers"] * vision_trained
    return Activations({module: nbytes for module, nbytes in stored.items() if nbytes}, temporary)


def _text_layers(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, chunk: PipelineChunk, slots: float
) -> list[LayerActivations]:
    linear, moe = dims.indices.get("linear_layers", ()), dims.indices["moe_layers"]
    by_number: dict[int, LayerActivations] = {}
    for numbers in layers_by_kind(dims, chunk.layers):
        first = numbers[0]
        layer = _text_layer(dims, split, training, moe=first in moe, slots=slots if first in linear else None)
        if training.lora is not None:  # between the two matrices of each adapter
            nbytes = training.lora.rank * training.precision.weight
            adapted = [name for name in adapter_sizes(dims, first) if name in training.lora.targets]
            adapters = (SavedTensor(f"adapter of {name}", nbytes) for name in adapted)
            layer = replace(layer, rows=(*layer.rows, *adapters))
        by_number |= dict.fromkeys(numbers, layer)
    return [by_number[number] for number in chunk.layers]


def _text_layer(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, *, moe: bool, slots: float | None = None
) -> LayerActivations:
    """A text layer without adapters; with full attention if there are no slots of linear attention's chunks."""
    w, e = TextWidths.of(dims, split), training.precision.weight
    widest, mlp = w.ffn, dense_mlp(dims, split, training)
    if moe:
        routed = dims["topk"] * training.expert_load / split.sequence_ranks
        widest = routed * (dims["moe_ffn"] + 2 * dims["hidden"] * split.expert_tp / 3)
        mlp = moe_mlp(dims, split, training)
    gradients = 3 * widest * e
    if slots is None:
        mixer = attention(dims, split, training)
    else:
        mixer = linear_attention(dims, split, training, slots)
        # For each head, recomputed by kernels or gradients: the chunk's updates and outputs, queries, keys and values
        # with their gradients, and the states between chunks with theirs.
        key, value = dims["l_key_dim"], dims["l_value_dim"]
        numbers = 4 * key + 4 * value + 2 * key * value / CHUNK
        gradients = max(gradients, dims["l_value_heads"] / split.tp * numbers * e)
    return LayerActivations((*mixer, *mlp), w.hidden * e, gradients + 2 * w.hidden * e)


def _multi_token_prediction(
    dims: Dimensions, split: ModelSplit, training: TrainingSettings, chunk: PipelineChunk, tokens: float
) -> tuple[float, float]:
    """For each token: what multi-token prediction stores in a chunk, and temporary memory.

    Later stages receive embedded next tokens together with hidden states; the last one has the layer, and the output
    layer once more.
    """
    received = 0.0 if chunk.pre_process else TextWidths.of(dims, split).hidden * training.precision.weight
    if not chunk.post_process:
        return received, 0.0
    layer = _text_layer(dims, split, training, moe=bool(dims["mtp_experts"]))
    inputs = mtp_inputs(dims, split, training, received=not chunk.pre_process)
    # Recomputation starts from next tokens and hidden states; the first have been received, and the output layer saves
    # the second.
    layer = replace(layer, rows=(*layer.rows, *inputs), input=layer.input * chunk.pre_process)
    inside, temporary = _with_recomputation([layer], training.recompute)
    head = output_layer(dims, split, training, in_chunks=training.loss_in_chunks(tokens))
    # What attaches the weighted losses to the model's backward pass: the mask, and the losses.
    weighted_losses = SavedTensor("weighted losses", 2 * _FLOAT)
    return received + inside + _total([*head, weighted_losses]), temporary


def _vision_tower(dims: Dimensions, split: ModelSplit, training: TrainingSettings) -> tuple[float, float, float]:
    """For each patch: activations stored by the tower, by the mergers, and temporary memory."""
    e, hidden, deepstack_layers = training.precision.weight, dims["v_hidden"], len(dims.indices["deepstack_mergers"])
    mergers = deepstack_layers * _total(merger(dims, split, training, after_shuffle=True))
    mergers += _total(merger(dims, split, training, after_shuffle=False))
    if Part.VISION_MODEL in training.frozen_weights:  # then a merger's input is saved only for the merger
        frozen = Part.VISION_PROJECTION in training.frozen_weights
        return 0.0, 0.0 if frozen else mergers + deepstack_layers * hidden * e, 0.0
    rows = tuple(vision_layer(dims, split, training))
    layer = LayerActivations(rows, hidden * e, (2 * dims["v_ffn"] / split.tp + 2 * hidden) * e)
    layers = [layer] * len(dims.indices["vision_layers"])
    tower, temporary = _with_recomputation(layers, training.vision_recompute)
    return tower + _total(patch_inputs(dims, training)), mergers, temporary


def _loss_temporary(dims: Dimensions, split: ModelSplit, training: TrainingSettings, tokens: float) -> float:
    """Logits, and then their gradient, in the model's precision in addition to the softmax; float32 models have both in
    one.

    In chunks the softmax is temporary too, and the sum of the output layer's gradients in float32 is in memory with a
    chunk's. The chunk's gradient of the tokens' own loss waits for that of multi-token prediction.
    """
    e, vocab = training.precision.weight, dims["vocab"] / split.tp
    logits = vocab * (e if e < _FLOAT else 0)
    weight = vocab * dims["hidden"] * (Part.LANGUAGE_MODEL not in training.frozen_weights)
    waiting = weight * e * training.trains_mtp
    if not training.loss_in_chunks(tokens):
        return logits * tokens + waiting
    in_chunk = logits + softmax(dims, split, training).nbytes
    return in_chunk * training.loss_chunk_tokens + weight * (_FLOAT + e) + waiting


def _with_recomputation(layers: Sequence[LayerActivations], recompute: Recompute) -> tuple[float, float]:
    """Stored activations of layers with a recomputation setting, and temporary memory while one is computed."""
    if not layers:
        return 0.0, 0.0
    gradients = max(layer.gradients for layer in layers)
    if recompute.granularity is None:
        return sum(layer.total for layer in layers), gradients
    if recompute.granularity == "selective":
        freed = [layer.freed(recompute.modules) for layer in layers]
        return sum(layer.total - less for layer, less in zip(layers, freed, strict=True)), gradients + max(freed)
    number = recompute.num_layers or 1
    if recompute.method == "block":
        recomputed, others = layers[:number], layers[number:]
        stored = sum(layer.input for layer in recomputed) + sum(layer.total for layer in others)
        return stored, gradients + max(layer.total for layer in recomputed)
    groups = [layers[begin : begin + number] for begin in range(0, len(layers), number)]
    largest = max(sum(layer.total for layer in group) for group in groups)
    return math.fsum(group[0].input for group in groups), gradients + largest
