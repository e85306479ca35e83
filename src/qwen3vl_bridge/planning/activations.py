"""Activations that one microbatch stores on a rank for its backward pass: of each module a table of the tensors that
autograd saves, in bytes for each token or patch; then their sums over a part of the pipeline, with recomputation.

The method is that of Korthikanti et al. (arXiv 2205.05198): a linear layer and a norm save their input, a product its
factors. Their layer of a GPT saves 34 bytes for each number of the hidden state, without the attention matrix. Here
there is no dropout and its masks (2 bytes); attention saves queries, keys, values, its output and one number for each
head (Dao et al., arXiv 2205.14135); queries and keys have a norm and a rotation, and the MLP is gated.

There are two kinds of layers. Megatron-core's local ones, with our attention, are compared in tests with the tensors
that autograd saves on a CPU. Transformer Engine's differ in the terms that are marked here: values are copied out of
the projection of queries, keys and values; experts' tokens are permuted by a map. On a GPU norms save only their input,
in the model's precision, where torch's on a CPU also save the normalised input and compute in float32; and attention's
output is the next layer's input, where packed rows are copied on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from qwen3vl_bridge.models.flops import CHUNK
from qwen3vl_bridge.planning.model_states import adapter_sizes, layers_by_kind
from qwen3vl_bridge.planning.split import ModelSplit, PipelineChunk
from qwen3vl_bridge.planning.training_settings import EightBits, Recompute, Sharding, TrainingSettings
from qwen3vl_bridge.weights.rows import Dimensions, Part

# Bytes: of a norm's statistic, of attention's log-sum-exp, of an index, of a float32 number in any precision.
_STATISTIC, _LOGSUMEXP, _INDEX, _FLOAT = 4, 4, 8, 4
# The saved tensors, by the beginnings of their names, that each of `recompute_modules` frees.
_FREED = {
    "core_attn": ("attention: ",),
    "mlp": ("MLP: ",),
    "moe": ("router: top k", "experts: ", "shared expert: "),
    "moe_act": ("experts: input of linear_fc2", "experts: factors"),
    "layernorm": ("router: input",),
}
# Inputs of products, which are saved in 8 bits if these compute so; attention saves linear_proj's too, in 16.
_INPUTS = (
    *("linear_qkv: input", "in_proj: input", "out_proj: input", "MLP: input of linear_fc1", "MLP: input of linear_fc2"),
    *("experts: linear_fc1 input", "experts: input of linear_fc2", "shared expert: input of linear_fc2"),
)
type SavedTensors = dict[str, float]  # bytes by description


class RankWidths:
    """A model's widths on one rank, and how it is trained: what every table below is made from."""

    def __init__(self, dims: Dimensions, split: ModelSplit, training: TrainingSettings) -> None:
        self.dims, self.split, self.training = dims, split, training
        self.e, self.te = training.precision.weight, training.transformer_engine  # bytes of a number; its layers
        self.kernels = self.te or training.on_gpu  # a norm, and attention over packed rows, is a kernel each
        self.norm_input = self.e if self.kernels else _FLOAT  # bytes of a number that the text model's norms save
        self.token = 1 / split.sequence_ranks  # the part of a token between layers
        self.hidden = dims["hidden"] * self.token  # numbers between layers
        self.heads, self.q = dims["heads"] / split.tp, dims["q"] / split.tp  # of queries: number and width
        self.groups = max(dims["kv_heads"] / split.tp, 1.0)  # of keys, and of values
        self.kv = self.groups * dims["head_dim"]
        self.ffn = dims["ffn"] / split.tp
        # Torch's LayerNorm saves mean and deviation in the input's precision on a CPU.
        self.layer_norm = 2 * (_STATISTIC if self.kernels else self.e)


# The language model, for each token of a context-parallel rank.


def norm(r: RankWidths, name: str, numbers: float, groups: float) -> SavedTensors:
    """A norm over `groups` parts of `numbers` numbers: its input and statistic; torch's on a CPU also saves the result
    before scaling.
    """
    e = r.norm_input
    saved = {f"{name}: input": numbers * e, f"{name}: statistic": groups * _STATISTIC}
    return saved if r.kernels else saved | {f"{name}: normalised": numbers * e}


def attention(r: RankWidths) -> SavedTensors:
    """Self attention of one layer, with the norm before it."""
    dims, split, e = r.dims, r.split, r.e
    # On a CPU, a context-parallel rank's two chunks of queries attend behind zeros in place of those before them.
    attended = split.cp + 0.5 if split.cp > 1 and not r.kernels else 1
    saved = {
        **norm(r, "norm before attention", r.hidden, r.token),
        "linear_qkv: input": r.hidden * e,
        **norm(r, "norm of queries", r.q, r.heads),
        **norm(r, "norm of keys", r.kv, r.groups),
        "queries": r.q * e * attended,
        "linear_proj: input": r.q * e,
        "attention: log-sum-exp": r.heads * _LOGSUMEXP * attended,
    }
    gated = "gated_q" in dims.sizes  # by a gate of each query, which is a part of linear_qkv's output
    if gated:  # compiled on a GPU, it saves its factors; on a CPU the gate in float32
        saved |= {"gate: input": r.q * e, "gate": r.q * (e if r.kernels else _FLOAT)}
    if r.te:
        return saved | {"keys": r.kv * e, "values": r.kv * e}
    if r.norm_input == e:  # norms of a part of linear_qkv's output save that, which is saved anyway
        saved["norm of keys: input"] = 0
        saved["norm of queries: input"] *= r.groups > 1
    # Ranks that share a group gather all groups and slice their own. Source: megatron-core 0.19, SelfAttention.
    parts_of_output = split.tp if split.tp <= dims["kv_heads"] else 1
    saved["linear_qkv: output"] = ((1 + gated) * dims["q"] + 2 * dims["kv"]) / parts_of_output * e
    if split.cp > 1:
        saved["keys and values of all context-parallel ranks"] = 2 * r.kv * e * split.cp
        if gated and r.kernels:  # copies of its parts are saved, and values are gathered
            saved["linear_qkv: output"] = 0
    else:
        saved["keys"] = r.kv * e
    if (r.training.packed and not r.kernels) or split.cp > 1:
        saved["attention: output"] = r.q * e * attended
    return saved


def linear_attention(r: RankWidths, slots: float = 1.0) -> SavedTensors:
    """Linear attention of one layer, with the norm before it.

    Between its projections a context-parallel rank has all tokens and its part of the heads, which is the same number.
    The delta rule in torch saves what autograd saves for each of its lines, and is compared in tests; its chunks never
    have tokens of two segments, so that it has more slots than tokens: `slots` for each token. With Transformer Engine,
    or where flash-linear-attention is installed, its kernels save what their own functions save, and recompute the
    rest. Source: its `CausalConv1dFunction`, `L2NormFunction`, `ChunkGatedDeltaRuleFunction`.
    """
    dims, tp, e = r.dims, r.split.tp, r.e
    key_dim, value_dim = dims["l_key_dim"], dims["l_value_dim"]
    qkv, value, heads = (dims[name] / tp for name in ("l_qkv", "l_value", "l_value_heads"))
    keys, key_heads = 2 * dims["l_key"] / tp, 2 * dims["l_key"] / key_dim / tp  # queries and keys together
    saved = {
        **norm(r, "norm before attention", r.hidden, r.token),
        "in_proj: input": r.hidden * e,
        "in_proj: output, which the convolution takes": (qkv + value + 2 * heads) * e,
        "decays: softplus": 2 * heads * _FLOAT,
        "writing strengths": heads * e,
        "out_proj: input": value * e,
    }
    if r.te or (r.training.delta_rule_kernels and e < _FLOAT):
        return saved | {
            "queries and keys, normalised": keys * e + key_heads * _STATISTIC,
            "queries and keys of value heads": 2 * heads * key_dim * e,
            "values": value * e,
            "decays since the chunk began": heads * _FLOAT,
            "inverses of chunks' systems": heads * CHUNK * e,
            # Transformer Engine's norm computes in the dtype of its weight, which is float32 here; torch's is compiled
            # together with the gate, and computed again.
            "norm of the output: input and result": 2 * value * _FLOAT if r.te else value * e,
            "norm of the output: statistic": heads * _STATISTIC,
            "gate": value * e,
        }
    rule = {  # line by line in float32: numbers of a head and a slot
        "decays, system, scores": 6 * CHUNK,
        "keys and queries": 10 * key_dim,
        "values": 4 * value_dim,
        "decays and strengths": 4 + 1 / CHUNK,
        "states": key_dim * value_dim / CHUNK,
    }
    return saved | {
        "convolution: earlier tokens": (dims["l_conv"] - 1) * (qkv * e + 1),
        "convolution: output": qkv * e,
        "queries and keys before their norm": (keys + key_heads) * _FLOAT,
        **{f"delta rule: {name}": heads * slots * count * _FLOAT for name, count in rule.items()},
        "delta rule: tokens in slots": slots * _INDEX,
        **norm(r, "norm of the output", value, heads),
        "gate and its activation": 2 * value * _FLOAT,
        "norm of the output: result": value * e,
    }


def gated_mlp(r: RankWidths, name: str, width: float, *, weighted: bool = False) -> SavedTensors:
    """SwiGLU between two linear layers of inner size `width`.

    Unfused, it saves the factors of each product: both halves, one of them activated, one with megatron-core's offset
    added; and the result, if it is weighted by the router.
    """
    return {
        f"{name}: output of linear_fc1": 2 * width * r.e,
        f"{name}: input of linear_fc2": width * r.e,
        f"{name}: factors": (2 + weighted) * width * r.e * (not r.training.fused_activation),
    }


def dense_mlp(r: RankWidths) -> SavedTensors:
    """The MLP of a layer without experts, with the norm before it."""
    # Transformer Engine's norm is a part of linear_fc1, and is recomputed with it.
    fc1_input = "MLP: input of linear_fc1" if r.te else "norm before MLP: output"
    before = norm(r, "norm before MLP", r.hidden, r.token)
    return {**before, fc1_input: r.hidden * r.e, **gated_mlp(r, "MLP", r.ffn)}


def moe_mlp(r: RankWidths) -> SavedTensors:
    """The router, the experts and the shared expert of a layer, with the norm before them."""
    dims, split, training, e = r.dims, r.split, r.training, r.e
    topk, experts = dims["topk"], dims["experts"]
    # Expert-tensor-parallel ranks have each other's tokens, with a part of the width each.
    routed = topk * r.token * training.expert_load * split.expert_tp
    scores = experts * _STATISTIC * training.balancing_loss
    permutation = 4 * (2 * experts + 1) if r.te else (experts + topk) * _INDEX
    saved = {
        **norm(r, "norm before experts", r.hidden, r.token),
        "router: input": r.hidden * e,
        "router: top k": r.token * (topk * (2 * _INDEX + _STATISTIC) + scores + 1),
        "experts: permutation of tokens": r.token * permutation,
        "experts: probabilities": routed * _STATISTIC,
        "experts: linear_fc1 input": routed * dims["hidden"] * e,
        **gated_mlp(r, "experts", routed * dims["moe_ffn"] / split.expert_tp, weighted=True),
    }
    if _saves_no_inputs_of_experts(r):
        saved |= {"experts: linear_fc1 input": 0, "experts: input of linear_fc2": 0}
    if ffn := dims.sizes.get("shared_ffn", 0):  # the input of the shared expert is the router's
        saved |= gated_mlp(r, "shared expert", ffn / split.tp)
        saved |= {"shared expert: output": r.hidden * e, "shared expert: gate": e * r.token}
    return saved


def _saves_no_inputs_of_experts(r: RankWidths) -> bool:
    """Of products whose weights get no gradients, and no adapters. In a layer that is recomputed the inputs count: its
    peak is in the forward pass, which has them.
    """
    return Part.LANGUAGE_MODEL in r.training.frozen_weights and r.training.recompute.granularity != "full"


def output_layer(r: RankWidths, *, in_chunks: bool) -> SavedTensors:
    """The output layer and its losses, which save the softmax unless they are computed in chunks."""
    labels = {"loss: labels": _INDEX + (not in_chunks)}
    return {"output_layer: input": r.hidden * r.e, **labels, "loss: softmax": softmax(r) * (not in_chunks)}


def softmax(r: RankWidths) -> float:
    """The softmax of the loss in float32; fused losses keep the logits instead."""
    return r.dims["vocab"] / r.split.tp * (r.e if r.training.loss_fusion else _FLOAT)


def embedding(r: RankWidths, *, pre_process: bool) -> SavedTensors:
    """The rotary angles that all layers share; token ids where they are embedded, and next tokens' if they are used.

    Transformer Engine's kernel takes angles in float32, the formula their cosines and sines in the heads' precision.
    """
    return {
        "rotary angles": r.dims["head_dim"] * (_FLOAT if r.te else 2 * r.e),
        "token ids": _INDEX * pre_process * (1 + r.training.trains_mtp),
    }


def mtp_inputs(r: RankWidths, *, received: bool) -> SavedTensors:
    """Multi-token prediction around its layer: norms of hidden states and of embedded next tokens, the projection of
    both, and the norm after the layer. Next tokens that are `received` from the previous stage are saved unchanged.
    """
    saved = {
        **norm(r, "norm of next tokens", r.hidden, r.token),
        **norm(r, "norm of hidden states", r.hidden, r.token),
        "eh_proj: input": 2 * r.hidden * r.e,
        **norm(r, "norm after multi-token prediction", r.hidden, r.token),
    }
    if r.norm_input == r.e:  # then a norm's input is no copy: hidden states are the output layer's input too
        saved["norm of hidden states: input"] = 0
        saved["norm of next tokens: input"] *= not received
        # The layer's input is a sequence-parallel part of what all ranks have gathered, which it saves.
        saved["eh_proj: output of other ranks' tokens"] = (r.dims["hidden"] - r.hidden) * r.e
    return saved


# The vision tower, for each patch that a rank encodes. It is tensor-parallel like the language model, but not
# sequence-parallel: tensors between its linear layers are not divided over the ranks.


def vision_layer(r: RankWidths) -> SavedTensors:
    """One layer of the vision tower."""
    hidden, ffn = r.dims["v_hidden"] * r.e, r.dims["v_ffn"] / r.split.tp * r.e
    heads = hidden / r.split.tp
    saved = {
        "norm before attention: input": hidden,
        "linear_qkv: input": hidden,
        "queries and keys": 2 * heads,
        "attention: log-sum-exp": r.dims["v_heads"] / r.split.tp * _LOGSUMEXP,
        "linear_proj: input": heads,
        "norm before MLP: input": hidden,
        "linear_fc1: input": hidden,
        "norms: statistics": 2 * r.layer_norm,
        "linear_fc1: output": ffn,
        "linear_fc2: input": ffn,
    }
    if r.te:
        return saved | {"values": heads}
    # Values are a view of the projection's output, and on a CPU frames' outputs are concatenated.
    return saved | {"linear_qkv: output": 3 * heads, "attention: output": heads * (not r.kernels)}


def patch_inputs(r: RankWidths) -> SavedTensors:
    """Pixels, indices of positions, and the angles that all layers share."""
    dims = r.dims
    return {
        "pixels": dims["v_channels"] * dims["v_temporal_patch"] * dims["v_patch"] ** 2 * r.e,
        "learned positions": 4 * (_INDEX + r.e),
        # Float32 in any precision: angles for Transformer Engine's kernel, otherwise their cosines and sines.
        "rotary angles": dims["v_hidden"] // dims["v_heads"] * _FLOAT * (1 if r.te else 2),
    }


def merger(r: RankWidths, *, deepstack: bool) -> SavedTensors:
    """One merger. DeepStack's have a layer's input, which is saved there, and normalise merged patches."""
    hidden, patches_per_token = r.dims["v_hidden"] * r.e, r.dims["v_merged"] // r.dims["v_hidden"]
    return {
        "norm: input": hidden * (not deepstack),
        "norm: statistics": r.layer_norm / (patches_per_token if deepstack else 1),
        "linear_fc1: input": hidden,
        "linear_fc1: output, linear_fc2: input": 2 * hidden / r.split.tp,
    }


# One microbatch in a part of the pipeline.


class MicrobatchWork(NamedTuple):
    """One microbatch on one rank."""

    tokens: float  # of its context-parallel part
    patches: float  # that it encodes
    vision_tokens: float  # among `tokens`
    slots: float = 1.0  # of linear attention's chunks, for each token, if torch computes it; kernels leave none empty

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


class Activations(NamedTuple):
    """Bytes of one microbatch in one chunk of the pipeline."""

    stored: dict[str, float]  # until its backward pass, by module
    temporary: float  # maximum while a layer is computed: recomputed activations, gradients of a layer
    logits: float  # while the loss is computed, with their gradients
    ahead: float = 0.0  # of the next microbatch, if each of its layers comes with the end of one of this microbatch's

    @property
    def total(self) -> float:
        """Total of `stored`."""
        return sum(self.stored.values())


class LayerActivations(NamedTuple):
    """A layer for recomputation, in bytes for each token or patch."""

    saved: SavedTensors
    input: float  # the only saved tensor if the complete layer is recomputed
    gradients: float  # of its widest tensors, while its backward pass runs


def chunk_activations(
    dims: Dimensions,
    split: ModelSplit,
    training: TrainingSettings,
    chunk: PipelineChunk,
    work: MicrobatchWork | None = None,
) -> Activations:
    """Activations that one microbatch stores in a chunk of the pipeline; with no `work`, of full rows."""
    r, work = RankWidths(dims, split, training), work or MicrobatchWork.of(dims, split, training)
    hidden, deepstack_layers = dims["hidden"] * r.e, len(dims.indices["deepstack_mergers"])
    in_chunks = 0 < training.loss_chunk_tokens < work.tokens
    layers = _text_layers(r, chunk.layers, work.slots)
    text, temporary = _with_recomputation(layers, training.recompute)
    text += sum(embedding(r, pre_process=chunk.pre_process).values())
    stored, temporary, logits = {"language model": text * work.tokens}, temporary * work.tokens, 0.0
    if training.trains_mtp:
        mtp, mtp_temporary = _multi_token_prediction(r, chunk, in_chunks=in_chunks)
        stored["multi-token prediction"] = mtp * work.tokens
        temporary = max(temporary, mtp_temporary * work.tokens)
    # Features of DeepStack layers that the chunk has received, for its own and later layers.
    if chunk.layers and (received := deepstack_layers - chunk.layers.start) > 0:
        stored["DeepStack"] = (received * hidden + _INDEX) * r.token * work.vision_tokens
    projected = 0.0
    if chunk.vision:
        tower, mergers, tower_temporary = _vision_tower(r)
        stored["vision model"], projected = tower * work.patches, mergers * work.patches
        # When its backward pass runs, the language model's is over, and has left gradients of what the mergers made.
        freed, of_features = sum(stored.values()) - stored["vision model"], (1 + deepstack_layers) * hidden
        temporary = max(temporary, tower_temporary * work.patches + of_features * work.vision_tokens - freed)
    vision_trained = not training.frozen_weights >= {Part.VISION_MODEL, Part.VISION_PROJECTION}
    if chunk.pre_process and vision_trained:  # each vision token replaces its placeholder, with its index
        projected += (hidden + 3 * _INDEX) * work.vision_tokens * (1 + training.trains_mtp)
    stored["vision projection"] = projected
    if chunk.post_process:
        head = norm(r, "final norm", r.hidden, r.token) | output_layer(r, in_chunks=in_chunks)
        stored["loss"] = sum(head.values()) * work.tokens
        logits = _loss_temporary(r, work.tokens, in_chunks=in_chunks)
        waits = training.sharding is Sharding.ALL or (chunk.pre_process and not dims["untied"])
        if waits and Part.LANGUAGE_MODEL not in training.frozen_weights:  # the gradient, for that of the embedding
            temporary += dims["vocab"] * dims["hidden"] / split.tp * r.e
    if chunk.pre_process != chunk.vision:
        # With separate vision ranks both sides keep what is sent, embeddings and DeepStack features of all vision
        # tokens of a replica, until the backward pass: megatron-core's schedule does. Then there is its gradient too.
        stored["sent between towers"] = (1 + deepstack_layers) * hidden * work.vision_tokens * split.cp
        received = stored["sent between towers"] * vision_trained
        temporary, logits = temporary + received, logits + received
    ahead = 0.0
    if training.overlaps_experts:
        ahead = _of_next_microbatch([_with_recomputation([layer], training.recompute)[0] for layer in layers])
    stored = {module: nbytes for module, nbytes in stored.items() if nbytes}
    return Activations(stored, temporary, logits, ahead * work.tokens)


def _of_next_microbatch(layers: list[float]) -> float:
    """What is held at most beside a microbatch's layers, while the next one's come, first to last, as its own leave."""
    return max(itertools.accumulate(a - b for a, b in zip(layers, [0.0, *reversed(layers)], strict=False)), default=0.0)


def _text_layers(r: RankWidths, numbers: Sequence[int], slots: float) -> list[LayerActivations]:
    dims, lora = r.dims, r.training.lora
    by_number: dict[int, LayerActivations] = {}
    for same in layers_by_kind(dims, numbers):
        linear, moe = (same[0] in dims.indices.get(name, ()) for name in ("linear_layers", "moe_layers"))
        layer = _text_layer(r, moe=moe, slots=slots if linear else None)
        if lora is not None:  # between the two matrices of each adapter
            sizes = adapter_sizes(dims, same[0])
            adapted = sizes.keys() & lora.targets
            saved = {f"adapter of {name}": lora.rank * r.e for name in adapted}
            # Gathered from sequence-parallel ranks. Source: Megatron-Bridge 0.6.2, ParallelLinearAdapter.
            kept = {"in_proj"} if lora.regathers else {"in_proj", "linear_qkv", "linear_fc1"}
            # Beside this rank's part with Transformer Engine, with local layers in its place.
            gathered = dims["hidden"] - r.hidden * (not r.te or r.hidden == dims["hidden"])
            saved |= {f"adapter of {n}: gathered input": gathered * r.e for n in adapted & kept}
            if lora.dora:  # the sum of both outputs is a factor, whose gradient and the magnitudes' are as large
                outputs = {name: sizes[name][1] * r.e for name in adapted}
                saved |= {f"adapter of {name}: output": n for name, n in outputs.items()}
                # When linear_fc1's are computed, what follows it is freed.
                after_fc1 = ("MLP: output of linear_fc1", "MLP: input of linear_fc2", "adapter of linear_fc2: output")
                freed = sum((layer.saved | saved).get(name, 0) for name in after_fc1)
                widest = max(3 * n - freed * (name == "linear_fc1") for name, n in outputs.items())
                layer = layer._replace(gradients=max(layer.gradients, widest + 2 * r.hidden * r.e))
            layer = layer._replace(saved=layer.saved | saved)
        if r.training.overlaps_experts:  # what nodes hand on: shared experts' part, inputs copied by norms
            parts = 2 * (r.norm_input != r.e) + (moe and "shared_ffn" in dims.sizes)
            layer = layer._replace(saved=layer.saved | {"handed on": parts * r.hidden * r.e})
        by_number |= dict.fromkeys(same, layer)
    if (bits := r.training.eight_bits) is not None and numbers:
        chunk = range(numbers[0], numbers[-1] + 1)
        for number in bits.layers(chunk, len(dims.indices["text_layers"])):
            by_number[number] = _with_inputs_in_8_bits(by_number[number], bits, r.e)
    return [by_number[number] for number in numbers]


def _with_inputs_in_8_bits(layer: LayerActivations, bits: EightBits, e: int) -> LayerActivations:
    """A layer whose products save their inputs in 8 bits."""
    names = [name for name in _INPUTS if name in layer.saved and name.split(":")[0] not in bits.exempt]
    return layer._replace(saved=layer.saved | {name: layer.saved[name] * bits.input / e for name in names})


def _text_layer(r: RankWidths, *, moe: bool, slots: float | None = None) -> LayerActivations:
    """A text layer without adapters; with full attention if there are no slots of linear attention's chunks."""
    before, mlp = attention(r) if slots is None else linear_attention(r, slots), moe_mlp(r) if moe else dense_mlp(r)
    # When the backward pass reaches attention, what the MLP saved is freed.
    of_attention = _attention_gradients(r) if slots is None else _linear_attention_gradients(r)
    more = max(_experts_temporary(r) if moe else _mlp_gradients(r), of_attention - sum(mlp.values()) / r.e)
    return LayerActivations(before | mlp, r.hidden * r.e, (more + 2 * r.hidden) * r.e)


# Numbers that a layer's backward pass holds at most beside what is still saved.


def _mlp_gradients(r: RankWidths) -> float:
    """Of linear_fc1's output, after the fused activation's gradient has replaced what it saved; or of its factors."""
    return (2 if r.training.fused_activation else 3) * r.ffn


def _experts_temporary(r: RankWidths) -> float:
    """Gradients, or what the forward pass has more, where each step's variables live until the last returns: tokens
    before and after their exchange, and experts' outputs, then concatenated or sorted back. What experts take is saved,
    unless their weights are frozen.
    """
    dims, split = r.dims, r.split
    routed = dims["topk"] * r.training.expert_load * r.token
    gradients = routed * (3 * dims["moe_ffn"] + 2 * dims["hidden"] * split.expert_tp)
    several = dims["experts"] // split.ep > 1
    # With Transformer Engine tokens are sorted by expert, and outputs back; with local layers outputs are
    # concatenated where experts are computed one after the other.
    copies = (1 + 2 * several if r.te else 2 + several) + (split.ep > 1) + _saves_no_inputs_of_experts(r)
    return max(gradients, routed * dims["hidden"] * split.expert_tp * copies)


def _attention_gradients(r: RankWidths) -> float:
    """Of queries, also as the kernel's float32 sum, of keys and values. Torch's kernel makes those of keys and values
    for each head of queries, and then sums them.
    """
    if r.te or not r.kernels:
        return 0.0
    keys = r.split.cp + 0.5 if r.split.cp > 1 else 1
    return keys * (2 * r.q + 3 * r.kv) + 2 * r.q


def _linear_attention_gradients(r: RankWidths) -> float:
    """For each head, recomputed by kernels or gradients: the chunk's updates and outputs, queries, keys and values with
    their gradients, and the states between chunks with theirs.
    """
    key, value = r.dims["l_key_dim"], r.dims["l_value_dim"]
    return r.dims["l_value_heads"] / r.split.tp * (4 * key + 4 * value + 2 * key * value / CHUNK)


def _multi_token_prediction(r: RankWidths, chunk: PipelineChunk, *, in_chunks: bool) -> tuple[float, float]:
    """For each token: what multi-token prediction stores in a chunk, and temporary memory.

    Later stages receive embedded next tokens together with hidden states; the last one has the layer, and the output
    layer once more.
    """
    received = r.hidden * r.e * (not chunk.pre_process)
    if not chunk.post_process:
        return received, 0.0
    layer = _text_layer(r, moe=bool(r.dims["mtp_experts"]))
    # Recomputation starts from next tokens and hidden states; the first have been received, and the output layer saves
    # the second.
    saved = layer.saved | mtp_inputs(r, received=not chunk.pre_process)
    inside, temporary = _with_recomputation(
        [layer._replace(saved=saved, input=layer.input * chunk.pre_process)], r.training.recompute
    )
    # What attaches the weighted losses to the model's backward pass: the mask, and the losses.
    head = output_layer(r, in_chunks=in_chunks) | {"weighted losses": 2 * _FLOAT}
    return received + inside + sum(head.values()), temporary


def _vision_tower(r: RankWidths) -> tuple[float, float, float]:
    """For each patch: activations stored by the tower, by the mergers, and temporary memory."""
    hidden, deepstack_layers = r.dims["v_hidden"], len(r.dims.indices["deepstack_mergers"])
    mergers = deepstack_layers * sum(merger(r, deepstack=True).values()) + sum(merger(r, deepstack=False).values())
    if Part.VISION_MODEL in r.training.frozen_weights:  # then a merger's input is saved only for the merger
        trained = Part.VISION_PROJECTION not in r.training.frozen_weights
        return 0.0, (mergers + deepstack_layers * hidden * r.e) * trained, 0.0
    gradients = (2 * r.dims["v_ffn"] / r.split.tp + 2 * hidden) * r.e
    layer = LayerActivations(vision_layer(r), hidden * r.e, gradients)
    tower, temporary = _with_recomputation([layer] * len(r.dims.indices["vision_layers"]), r.training.vision_recompute)
    return tower + sum(patch_inputs(r).values()), mergers, temporary


def _loss_temporary(r: RankWidths, tokens: float, *, in_chunks: bool) -> float:
    """Logits, or their gradient, in the model's precision in addition to the softmax; float32 models have both in one.

    In chunks the softmax is temporary too, and the sum of the output layer's gradients in float32 is in memory with a
    chunk's, whose logits are freed before. The chunk's gradient of the tokens' own loss waits for that of multi-token
    prediction.
    """
    vocab = r.dims["vocab"] / r.split.tp
    logits = vocab * r.e * (r.e < _FLOAT)
    weight = vocab * r.dims["hidden"] * (Part.LANGUAGE_MODEL not in r.training.frozen_weights)
    waiting = weight * r.e * r.training.trains_mtp
    if not in_chunks:
        return logits * tokens + waiting
    gradient, tokens = softmax(r), r.training.loss_chunk_tokens
    return max((logits + gradient) * tokens, gradient * tokens + weight * r.e) + weight * _FLOAT + waiting


def _with_recomputation(layers: Sequence[LayerActivations], recompute: Recompute) -> tuple[float, float]:
    """Stored activations of layers with a recomputation setting, and temporary memory while one is computed."""
    if not layers:
        return 0.0, 0.0
    totals, number = [sum(layer.saved.values()) for layer in layers], recompute.num_layers or 1
    gradients = [layer.gradients for layer in layers]
    if recompute.granularity != "full":  # the tensors of the recomputed modules are freed
        names = tuple(name for module in recompute.modules for name in _FREED[module])
        freed = [sum(n for name, n in layer.saved.items() if name.startswith(names)) for layer in layers]
        return sum(totals) - sum(freed), max(map(sum, zip(freed, gradients, strict=True)))
    if recompute.method == "block":
        groups = [range(place, place + 1) for place in range(min(number, len(layers)))]
        kept, later = sum(totals[number:]), max(gradients[number:], default=0.0)
    else:
        groups = [range(begin, min(begin + number, len(layers))) for begin in range(0, len(layers), number)]
        kept, later = 0.0, 0.0
    computed = (sum(totals[place] for place in group) + max(gradients[place] for place in group) for group in groups)
    return kept + sum(layers[group[0]].input for group in groups), max(later, *computed)
