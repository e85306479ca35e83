"""Estimate the activations that one microbatch stores on a rank until its backward pass.

Method: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198). A linear
layer or a norm saves its input, a product its factors. Their GPT layer saves 34 bytes per element of the hidden state,
without the attention matrix. Qwen3-VL differs: no dropout (no 1-byte masks), flash attention (Dao et al., arXiv
2205.14135), which saves queries, keys, values, output and a log-sum-exp per head, norms of queries and keys, and
SwiGLU.

Each `saved_by_*` function returns a table: the tensors that autograd saves in a module, with their bytes per token (in
the vision tower per patch). The rest of the file sums the tables over the layers of a pipeline chunk.

Legend: h hidden size, q width of all queries, kv width of all keys (or values), ffn inner size of the MLP, e bytes per
element. All are sizes on one rank.

The tables cover two layer specs:
- megatron-core's local layers with our attention. Tests compare them with what autograd saves on a CPU.
- Transformer Engine's layers, marked by `if local.te`. They were derived from its source code.
Where CPU and GPU differ, `local.kernels` is True for the GPU. There a norm saves only its input, in the model's
precision. On a CPU torch's norm computes in float32 and also saves the normalized input, and attention copies packed
rows.

Qwen3.8-Flash-Next: gated residuals, sparse attention and the mixer are tables like the others. The n-gram embedding of
its few layers, the temporary memory of the indexer, and padded rows are approximate. Every document is assumed to be
longer than the indexer's budget; shorter ones save about as much.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from qwen3vl_bridge.config.flops import CHUNK
from qwen3vl_bridge.planning.model_states import adapter_sizes, group_layers_by_kind
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout, PipelineChunk
from qwen3vl_bridge.planning.training_settings import Recompute, Sharding, TrainingSettings
from qwen3vl_bridge.weights.rows import Component, Dimensions

# Bytes of a norm's statistic, of attention's log-sum-exp, of an index, and of a float32 element.
_STATISTIC, _LOGSUMEXP, _INDEX, _FLOAT = 4, 4, 8, 4
_PAIRS_OF_PIECE = 2048  # `PIECE` of sparse attention, in `models/qwen4_exp/sparse_kernels.py`
_SORTED_PAIR = 32  # bytes that torch.sort needs for each int32 on a GPU; measured on the fake GPU
# Saved tensors that each of `recompute_modules` frees, by the beginnings of their names.
_FREED_BY_RECOMPUTATION = {
    "core_attn": ("attention: ",),
    "mlp": ("MLP: ",),
    "moe": ("router: top k", "experts: ", "shared expert: "),
    "moe_act": ("experts: input of linear_fc2", "experts: factors"),
    "layernorm": ("router: input",),
}
# Saved inputs of linear layers. FP8 layers save them in FP8, except linear_proj's: attention saves it in bf16 anyway.
_LINEAR_INPUTS = (
    *("linear_qkv: input", "in_proj: input", "out_proj: input", "MLP: input of linear_fc1", "MLP: input of linear_fc2"),
    *("experts: linear_fc1 input", "experts: input of linear_fc2", "shared expert: input of linear_fc2"),
)
type SavedTensors = dict[str, float]  # bytes per token or patch, by description


class LocalSizes:
    """Sizes of a model's tensors on one rank, and the settings that change what autograd saves."""

    def __init__(self, dims: Dimensions, layout: ParallelLayout, training: TrainingSettings) -> None:
        self.dims, self.layout, self.training = dims, layout, training
        self.e, self.te = training.precision.weight, training.transformer_engine
        # Norms and attention over packed rows are one kernel each, which saves no intermediate results.
        self.kernels = self.te or training.on_gpu
        self.norm_e = self.e if self.kernels else _FLOAT  # bytes per element saved by the language model's norms
        self.token = 1 / layout.sequence_ranks  # sequence parallelism: fraction of a token between linear layers
        self.h = dims["hidden"] * self.token  # hidden state between linear layers
        self.streams = dims.sizes.get("streams", 0)  # of a gated residual; 0 for an ordinary one
        self.residual = self.h * max(self.streams, 1)  # hidden state between layers
        self.is_sparse = bool(dims.sizes.get("index_budget"))
        self.heads, self.q = dims["heads"] / layout.tp, dims["q"] / layout.tp
        self.kv_heads = max(dims["kv_heads"] / layout.tp, 1.0)
        self.kv = self.kv_heads * dims["head_dim"]
        self.ffn = dims["ffn"] / layout.tp
        # LayerNorm saves mean and deviation; torch's on a CPU in the precision of the input.
        self.layer_norm = 2 * (_STATISTIC if self.kernels else self.e)
        self.text_frozen = Component.LANGUAGE_MODEL in training.frozen_weights
        # On a GPU a model's inputs and outputs count even if autograd saves none: variables hold them until the loss.
        self.holds_ends = self.kernels or not self.text_frozen

    def saves_input(self, layer: str) -> bool:
        """Return True if the linear layer `layer` of the language model saves its input.

        The gradient of its weight or adapter needs the input. Transformer Engine's frozen layers save their input too,
        except experts. Always True under full recomputation, because the memory peak is in the repeated forward pass.
        """
        lora, recompute = self.training.lora, self.training.recompute
        if not self.text_frozen or recompute.granularity == "full" or (lora is not None and layer in lora.targets):
            return True
        return self.te and layer != "experts"


# Tables of the language model, in bytes per token of a context-parallel rank.


def saved_by_norm(local: LocalSizes, name: str, elements: float, groups: float) -> SavedTensors:
    """Return the tensors saved by a norm with `elements` elements and `groups` statistics (1, or 1 per head) per token.

    On a CPU, torch also saves the normalized input for the gradient of the norm's weight, unless the weight is frozen.
    """
    saved = {f"{name}: input": elements * local.norm_e, f"{name}: statistic": groups * _STATISTIC}
    if local.kernels or local.text_frozen:
        return saved
    return saved | {f"{name}: normalized": elements * local.norm_e}


def saved_before_block(local: LocalSizes, name: str) -> SavedTensors:
    """Return the tensors saved by the norm before attention or an MLP, or by the gated residual in its place.

    A gated residual saves the streams, and recomputes the block's input from them. Adding the block's
    output to the streams saves the output and its weight in each stream. Source: `models/qwen4_exp/residual.py`.
    """
    if not local.streams:
        return saved_by_norm(local, name, local.h, local.token)
    added = (local.h + local.streams * local.token) * local.e
    return {f"{name}: streams": local.residual * local.e, f"{name}: output of the block and its weights": added}


def saved_by_stream_norm(local: LocalSizes, name: str) -> SavedTensors:
    """Return the tensors saved by an RMS norm of each residual stream."""
    return saved_by_norm(local, name, local.residual, local.streams * local.token)


def saved_by_stream_mixer(local: LocalSizes, name: str) -> SavedTensors:
    """Return the tensors saved by the module that mixes the residual streams after the last layer."""
    return {
        **saved_by_stream_norm(local, name),
        f"{name}: normalized streams": local.residual * local.e,
        f"{name}: gates": local.residual * local.e,
        f"{name}: projections of low rank": 2 * local.dims["lowrank"] * local.token * local.e,
    }


def saved_by_ngram_embedding(local: LocalSizes) -> SavedTensors:
    """Return the tensors saved by the n-gram embedding of a layer. Approximate, see the module's docstring."""
    dims, e, residual = local.dims, local.e, local.residual
    # The convolution multiplies in float32; compiled, it saves its input alone.
    convolution = e if local.kernels else dims["ple_conv"] * _FLOAT + e
    return {
        "n-grams: ids": 2 * len(dims.indices["ngram_heads"]) * local.token * _INDEX,
        "n-grams: embeddings": dims["ple_dim"] * local.token * e,
        **saved_by_stream_norm(local, "n-grams: norm of keys"),
        **saved_by_stream_norm(local, "n-grams: norm of queries"),
        "n-grams: keys and queries": 2 * residual * e,
        "n-grams: values before gates": local.h * e,
        **saved_by_stream_norm(local, "n-grams: norm of values"),
        "n-grams: convolution": residual * convolution,
    }


def saved_by_attention(local: LocalSizes) -> SavedTensors:
    """Return the tensors saved by self attention and the norm before it."""
    dims, layout, e = local.dims, local.layout, local.e
    # On a CPU a context-parallel rank pads its two chunks of queries by zeros for all tokens before them.
    attended = layout.cp + 0.5 if layout.cp > 1 and not (local.kernels or local.is_sparse) else 1
    saved = {
        **saved_before_block(local, "norm before attention"),
        "linear_qkv: input": local.h * e * local.saves_input("linear_qkv"),
        **saved_by_norm(local, "norm of queries", local.q, local.heads),
        **saved_by_norm(local, "norm of keys", local.kv, local.kv_heads),
        "queries": local.q * e * attended,
        "linear_proj: input": local.q * e,
        "attention: log-sum-exp": local.heads * _LOGSUMEXP * attended,
    }
    gated = "gated_q" in dims.sizes  # Qwen3.5: linear_qkv also outputs a gate for each query
    if gated:  # compiled on a GPU, the gate saves its factors; on a CPU its sigmoid in float32
        saved |= {"gate: input": local.q * e, "gate": local.q * (e if local.kernels else _FLOAT)}
        saved["linear_proj: input"] *= local.saves_input("linear_proj")
    if local.is_sparse:
        # Saved for each query: the selected blocks in int32 (with kernels also its own block and the number of blocks),
        # and the index of its token. Kernels also save the first token of each block in the batch.
        saved["selected blocks"] = (dims["index_budget"] // dims["index_block"] + 2 * local.kernels) * 4 + _INDEX
        saved["first tokens of blocks"] = _INDEX / dims["index_block"] * layout.cp * local.kernels
        if not local.kernels:
            del saved["attention: log-sum-exp"]
        if layout.cp > 1:
            saved["keys and values of all context-parallel ranks"] = 2 * local.kv * e * layout.cp
            if local.te:
                return saved
    if local.te:  # copies keys and values out of linear_qkv's output
        return saved | {"keys": local.kv * e, "values": local.kv * e}
    if local.norm_e == e:  # these norms save a view of linear_qkv's output, which is saved below
        saved["norm of keys: input"] = 0
        saved["norm of queries: input"] *= local.kv_heads > 1
    # With fewer groups of keys than ranks, each rank gathers the output of all and takes its slice. Source:
    # megatron-core 0.19, SelfAttention.
    divided_by = layout.tp if layout.tp <= dims["kv_heads"] else 1
    saved["linear_qkv: output"] = ((1 + gated) * dims["q"] + 2 * dims["kv"]) / divided_by * e
    if layout.cp > 1:
        saved["keys and values of all context-parallel ranks"] = 2 * local.kv * e * layout.cp
        if gated and local.kernels:  # copies of its slices are saved, and values are gathered
            saved["linear_qkv: output"] = 0
    else:
        saved["keys"] = local.kv * e
    if ((local.training.packed and not local.kernels) or layout.cp > 1) and not local.is_sparse:
        saved["attention: output"] = local.q * e * attended
        saved["linear_proj: input"] *= local.saves_input("linear_proj")
    return saved


def saved_by_linear_attention(local: LocalSizes, slots: float = 1.0) -> SavedTensors:
    """Return the tensors saved by linear attention (Gated DeltaNet) and the norm before it.

    Between the projections, a context-parallel rank has all tokens and its share of the heads ("headwise"), or its own
    tokens and all heads ("chunkwise"). Both have the same number of elements. But "chunkwise" computes the delta rule
    twice, and the first computation has columns for keys in addition to those for values
    (`models/common/chunkwise.py`).

    Args:
        slots: number of slots per token in the chunks of torch's delta rule. It may exceed 1: chunks never cross
            segments, so some slots of a segment's last chunk are empty.
    """
    dims, tp, e = local.dims, local.layout.tp, local.e
    key_dim, value_dim = dims["l_key_dim"], dims["l_value_dim"]
    qkv, value, heads = (dims[name] / tp for name in ("l_qkv", "l_value", "l_value_heads"))
    keys, key_heads = 2 * dims["l_key"] / tp, 2 * dims["l_key"] / key_dim / tp  # queries and keys together
    saved = {
        **saved_before_block(local, "norm before attention"),
        "in_proj: input": local.h * e * local.saves_input("in_proj"),
        "in_proj: output, input of the convolution": (qkv + value + 2 * heads) * e,
        "decays: softplus": 2 * heads * _FLOAT,
        "writing strengths": heads * e,
        "out_proj: input": value * e * local.saves_input("out_proj"),
    }
    columns, rules = value_dim, 1  # columns of all computations of the delta rule, and the number of computations
    if local.layout.exchanges_states(dims):
        columns, rules = columns + value_dim + key_dim, 2
        # For one segment per row: the state before the first computation, what it does to the state, and the states
        # that it is applied to and that the second computation starts from; of two chunks.
        tokens = local.training.seq_length / local.layout.cp
        saved["states of chunks"] = 2 * heads * key_dim * (2 * (value_dim + key_dim) + 2 * value_dim) * _FLOAT / tokens
    if local.te or (local.training.delta_rule_kernels and e < _FLOAT):
        # flash-linear-attention's kernels recompute what is not listed. Source: its `CausalConv1dFunction`,
        # `L2NormFunction`, `ChunkGatedDeltaRuleFunction`.
        return saved | {
            "queries and keys, normalized": keys * e + key_heads * _STATISTIC,
            "queries and keys of value heads": 2 * heads * key_dim * e,
            "values": heads * columns * e,
            "decays since the chunk began": rules * heads * _FLOAT,
            "inverses of chunks' systems": rules * heads * CHUNK * e,
            # Transformer Engine's norm computes in float32, the dtype of its weight. torch's is compiled together with
            # the gate, which computes it again.
            "norm of the output: input and result": 2 * value * _FLOAT if local.te else value * e,
            "norm of the output: statistic": heads * _STATISTIC,
            "gate": value * e,
        }
    # The delta rule in torch saves tensors in float32 at each of its lines: elements per head and slot.
    delta_rule = {
        "decays, system, scores": 6 * CHUNK * rules,
        "keys and queries": 10 * key_dim * rules,
        "values": 4 * columns,
        "decays and strengths": (4 + 1 / CHUNK) * rules,
        "states": key_dim * columns / CHUNK,
    }
    if local.text_frozen:  # the convolution saves no input, and the decays no factor
        saved |= {"in_proj: output, input of the convolution": 0, "decays: softplus": heads * _FLOAT}
    return saved | {
        "convolution: earlier tokens": (dims["l_conv"] - 1) * (qkv * e * (not local.text_frozen) + 1),
        "convolution: output": qkv * e,
        "queries and keys before their norm": (keys + key_heads) * _FLOAT,
        **{f"delta rule: {name}": heads * slots * count * _FLOAT for name, count in delta_rule.items()},
        "delta rule: tokens in slots": slots * _INDEX,
        **saved_by_norm(local, "norm of the output", value, heads),
        # SiLU saves its input, and the product with the norm its result. A sigmoid, as models with streams have, saves
        # only the result.
        "gate and its activation": (1 if local.streams else 2) * value * _FLOAT,
        "norm of the output: result": value * e,
    }


def saved_by_swiglu(local: LocalSizes, name: str, ffn: float, *, weighted: bool = False) -> SavedTensors:
    """Return the tensors saved by SwiGLU between two linear layers with inner size `ffn`.

    Without `bias_activation_fusion` the factors of each product are saved too: the activated gate, the other half with
    megatron-core's offset added, and the result if it is `weighted` by the router's probabilities.
    """
    fc2 = "experts" if name == "experts" else "linear_fc2"
    return {
        f"{name}: output of linear_fc1": 2 * ffn * local.e,
        f"{name}: input of linear_fc2": ffn * local.e * local.saves_input(fc2),
        f"{name}: factors": (2 + weighted) * ffn * local.e * (not local.training.fused_activation),
    }


def saved_by_mlp(local: LocalSizes) -> SavedTensors:
    """Return the tensors saved by a dense MLP and the norm before it."""
    # Transformer Engine fuses the norm into linear_fc1 and recomputes it. A local norm's output, which is the input of
    # linear_fc1, is not freed by recomputing the MLP.
    fc1_input = "MLP: input of linear_fc1" if local.te else "norm before MLP: output, input of linear_fc1"
    return {
        **saved_by_norm(local, "norm before MLP", local.h, local.token),
        fc1_input: local.h * local.e * local.saves_input("linear_fc1"),
        **saved_by_swiglu(local, "MLP", local.ffn),
    }


def saved_by_moe(local: LocalSizes) -> SavedTensors:
    """Return the tensors saved by a MoE layer: the router, the experts, the shared expert and the norm before them."""
    dims, layout, training, e = local.dims, local.layout, local.training, local.e
    topk, experts = dims["topk"], dims["experts"]
    # Expert-tensor-parallel ranks exchange their tokens, and divide the inner size.
    routed = topk * local.token * training.expert_load * layout.expert_tp
    scores = experts * _STATISTIC * training.balancing_loss
    # Transformer Engine permutes tokens by a map of int32.
    permutation = 4 * (2 * experts + 1) if local.te else (experts + topk) * _INDEX
    saved = {
        **saved_before_block(local, "norm before experts"),
        "router: top k": local.token * (topk * (2 * _INDEX + _STATISTIC) + scores + 1),
        "experts: permutation of tokens": local.token * permutation,
        "experts: probabilities": routed * _STATISTIC,
        "experts: linear_fc1 input": routed * dims["hidden"] * e * local.saves_input("experts"),
        **saved_by_swiglu(local, "experts", routed * dims["moe_ffn"] / layout.expert_tp, weighted=True),
        "router: input": local.h * e,
    }
    if shared_ffn := dims.sizes.get("shared_ffn", 0):  # its input is the router's
        saved |= saved_by_swiglu(local, "shared expert", shared_ffn / layout.tp)
        saved |= {"shared expert: output": local.h * e, "shared expert: gate": e * local.token}
    return saved


def saved_by_output_layer(local: LocalSizes, *, loss_in_chunks: bool) -> SavedTensors:
    """Return the tensors saved by the output layer and the loss. A loss in chunks does not save its softmax."""
    return {
        "output_layer: input": local.h * local.e * (loss_in_chunks or local.holds_ends),
        "loss: labels": _INDEX + (not loss_in_chunks),
        "loss: softmax": softmax_bytes(local) * (not loss_in_chunks),
    }


def softmax_bytes(local: LocalSizes) -> float:
    """Return the bytes per token that the loss saves: its softmax in float32, or the logits if `loss_fusion` is set."""
    return local.dims["vocab"] / local.layout.tp * (local.e if local.training.loss_fusion else _FLOAT)


def saved_by_embedding(local: LocalSizes, *, pre_process: bool) -> SavedTensors:
    """Return the saved tensors that all layers share: rotary angles, and token ids if the chunk has the embedding.

    Transformer Engine's kernel saves angles in float32. Our formula saves cosines and sines in the heads' precision.
    """
    return {
        "rotary angles": local.dims["head_dim"] * (_FLOAT if local.te else 2 * local.e),
        # Multi-token prediction also embeds the next tokens.
        "token ids": _INDEX * pre_process * local.holds_ends * (1 + local.training.trains_mtp),
    }


def saved_around_mtp_layer(local: LocalSizes, *, received: bool) -> SavedTensors:
    """Return the tensors that multi-token prediction saves outside its layer.

    These modules are the norms of hidden states and of embedded next tokens, the projection of both, and the final
    norm or the mixer of residual streams.

    Args:
        received: True if the embedded next tokens come from the previous pipeline stage.
    """
    if local.streams:
        of_streams = saved_by_norm(local, "norm of hidden states", local.residual, local.token)
        if local.norm_e == local.e:  # saved by the mixer of the model
            of_streams["norm of hidden states: input"] = 0
        return {
            **saved_by_norm(local, "norm of next tokens", local.h, local.token),
            **of_streams,
            "fc_embedding and fc_hidden: inputs": (local.h + local.residual) * local.e,
            **saved_by_stream_mixer(local, "mixer after multi-token prediction"),
        }
    saved = {
        **saved_by_norm(local, "norm of next tokens", local.h, local.token),
        **saved_by_norm(local, "norm of hidden states", local.h, local.token),
        "eh_proj: input": 2 * local.h * local.e,
        **saved_by_norm(local, "norm after multi-token prediction", local.h, local.token),
    }
    if local.norm_e == local.e:  # then norms save their inputs without a copy
        saved["norm of hidden states: input"] = 0  # saved by the output layer
        saved["norm of next tokens: input"] *= not received
        # The layer's input is a sequence-parallel slice of the gathered output, all of which stays in memory.
        saved["eh_proj: output of other ranks' tokens"] = (local.dims["hidden"] - local.h) * local.e
    return saved


# Tables of the vision tower, in bytes per patch that a rank encodes. The tower is tensor-parallel, but not
# sequence-parallel: tensors between its linear layers are not divided over ranks.


def saved_by_vision_layer(local: LocalSizes) -> SavedTensors:
    """Return the tensors saved by one layer of the vision tower."""
    tp = local.layout.tp
    hidden, ffn = local.dims["v_hidden"] * local.e, local.dims["v_ffn"] / tp * local.e
    heads = hidden / tp
    saved = {
        "norm before attention: input": hidden,
        "linear_qkv: input": hidden,
        "queries and keys": 2 * heads,
        "attention: log-sum-exp": local.dims["v_heads"] / tp * _LOGSUMEXP,
        "linear_proj: input": heads,
        "norm before MLP: input": hidden,
        "linear_fc1: input": hidden,
        "norms: statistics": 2 * local.layer_norm,
        "linear_fc1: output": ffn,
        "linear_fc2: input": ffn,
    }
    if local.te:
        return saved | {"values": heads}
    # Values are a view of linear_qkv's output. On a CPU the outputs of frames are concatenated.
    return saved | {"linear_qkv: output": 3 * heads, "attention: output": heads * (not local.kernels)}


def saved_by_patch_embedding(local: LocalSizes) -> SavedTensors:
    """Return the tensors saved by the patch and position embeddings, and the rotary angles that all layers share."""
    dims = local.dims
    return {
        "pixels": dims["v_channels"] * dims["v_temporal_patch"] * dims["v_patch"] ** 2 * local.e,
        "learned positions": 4 * (_INDEX + local.e),
        # In float32: angles for Transformer Engine's kernel, cosines and sines for our formula.
        "rotary angles": dims["v_hidden"] // dims["v_heads"] * _FLOAT * (1 if local.te else 2),
    }


def saved_by_patch_merger(local: LocalSizes, *, deepstack: bool) -> SavedTensors:
    """Return the tensors saved by one patch merger.

    A DeepStack merger normalizes merged patches. Its input is already saved by the next vision layer.
    """
    hidden = local.dims["v_hidden"] * local.e
    patches_per_token = local.dims["v_merged"] // local.dims["v_hidden"]
    return {
        "norm: input": hidden * (not deepstack),
        "norm: statistics": local.layer_norm / (patches_per_token if deepstack else 1),
        "linear_fc1: input": hidden,
        "linear_fc1: output, linear_fc2: input": 2 * hidden / local.layout.tp,
    }


# One microbatch in one chunk of the pipeline.


class MicrobatchWork(NamedTuple):
    """Tokens and patches of one microbatch on one rank."""

    tokens: float  # on a context-parallel rank
    patches: float  # that the rank encodes
    vision_tokens: float  # tokens of images and videos among `tokens`
    slots: float = 1.0  # slots per token of the delta rule in torch

    @classmethod
    def of_full_rows(cls, dims: Dimensions, layout: ParallelLayout, training: TrainingSettings) -> MicrobatchWork:
        """Return the largest possible work: each row has `seq_length` tokens and the maximum number of patches.

        Images are assumed to be divided evenly over context-parallel ranks. A rank without images encodes a blank image
        of one vision token.
        """
        patches_per_token = dims["v_merged"] // dims["v_hidden"]
        patches = patches_per_token * training.seq_length
        if training.max_patches is not None:
            patches = min(training.max_patches, patches)
        tokens, patches = (training.micro_batch_size * size / layout.cp for size in (training.seq_length, patches))
        return cls(tokens, max(patches, patches_per_token), patches / patches_per_token)


class Activations(NamedTuple):
    """Bytes of activations of one microbatch in one chunk of the pipeline."""

    stored: dict[str, float]  # until its backward pass, by module
    temporary: float  # maximum while a layer is computed: recomputed activations, gradients
    logits: float  # while the loss is computed: logits and their gradients
    # With `overlap_moe_expert_parallel_comm`: additional bytes while layers of this microbatch are freed and those of
    # the next one are allocated.
    next_microbatch: float = 0.0

    @property
    def total(self) -> float:
        """Total bytes that all modules store until the backward pass."""
        return sum(self.stored.values())


class LayerActivations(NamedTuple):
    """Activations of one layer, in bytes per token or patch."""

    saved: SavedTensors
    input: float  # the only tensor that full recomputation saves
    gradients: float  # maximum during the layer's backward pass, in addition to saved tensors


def chunk_activations(
    dims: Dimensions,
    layout: ParallelLayout,
    training: TrainingSettings,
    chunk: PipelineChunk,
    work: MicrobatchWork | None = None,
) -> Activations:
    """Estimate the activations of one microbatch in one chunk of the pipeline.

    Args:
        work: tokens and patches of the microbatch; None for full rows.
    """
    local, work = LocalSizes(dims, layout, training), work or MicrobatchWork.of_full_rows(dims, layout, training)
    hidden, deepstack_layers = dims["hidden"] * local.e, len(dims.indices["deepstack_mergers"])
    loss_in_chunks = 0 < training.loss_chunk_tokens < work.tokens
    layers = _text_layers(local, chunk.layers, work.slots)
    text, temporary = _apply_recomputation(layers, training.recompute)
    text += sum(saved_by_embedding(local, pre_process=chunk.pre_process).values())
    stored, temporary, logits = {"language model": text * work.tokens}, temporary * work.tokens, 0.0
    if training.trains_mtp:
        mtp, mtp_temporary = _multi_token_prediction(local, chunk, loss_in_chunks=loss_in_chunks)
        stored["multi-token prediction"] = mtp * work.tokens
        temporary = max(temporary, mtp_temporary * work.tokens)
    vision_trained = not training.frozen_weights >= {Component.VISION_MODEL, Component.VISION_PROJECTION}
    # DeepStack features that the chunk receives, for its own and later layers. On a GPU even those of a frozen tower
    # count, because variables of the forward pass hold them.
    holds_features = vision_trained or local.kernels
    if chunk.layers and (received := deepstack_layers - chunk.layers.start) > 0:
        stored["DeepStack"] = (received * hidden + _INDEX) * local.token * work.vision_tokens * holds_features
    projected = 0.0
    if chunk.vision:
        tower, mergers, tower_temporary = _vision_tower(local)
        stored["vision model"], projected = tower * work.patches, mergers * work.patches
        # The tower's backward pass is the last: activations of the language model are freed by then, but the gradients
        # of the vision features are in memory.
        freed, features = sum(stored.values()) - stored["vision model"], (1 + deepstack_layers) * hidden
        temporary = max(temporary, tower_temporary * work.patches + features * work.vision_tokens - freed)
    if chunk.pre_process and vision_trained:  # features and their indices, inserted into the embeddings
        projected += (hidden + 3 * _INDEX) * work.vision_tokens * (1 + training.trains_mtp)
    stored["vision projection"] = projected
    if chunk.post_process:
        final = (
            saved_by_stream_mixer(local, "mixer")
            if local.streams
            else saved_by_norm(local, "final norm", local.h, local.token)
        )
        head = final | saved_by_output_layer(local, loss_in_chunks=loss_in_chunks)
        stored["loss"] = sum(head.values()) * work.tokens
        logits = _loss_temporary(local, work.tokens, loss_in_chunks=loss_in_chunks)
        # The output weight's gradient stays in memory until that of the embedding is added (tied weights), or until it
        # is reduced (ZeRO-3).
        keeps_gradient = training.sharding is Sharding.ALL or (chunk.pre_process and not dims["untied"])
        if keeps_gradient and Component.LANGUAGE_MODEL not in training.frozen_weights:
            temporary += dims["vocab"] * dims["hidden"] / layout.tp * local.e
    if chunk.pre_process != chunk.vision:
        # Separate vision ranks: megatron-core's schedule keeps the features of all vision tokens of a replica on both
        # sides until the backward pass. Then their gradients are in memory too.
        stored["sent between towers"] = (1 + deepstack_layers) * hidden * work.vision_tokens * layout.cp
        received = stored["sent between towers"] * vision_trained
        temporary, logits = temporary + received, logits + received
    next_microbatch = 0.0
    if training.overlaps_experts:
        # Layer i of the next microbatch is allocated when layer n - i of this one is freed. Return the peak.
        bytes_of_layers = [_apply_recomputation([layer], training.recompute)[0] for layer in layers]
        steps = zip(bytes_of_layers, [0.0, *reversed(bytes_of_layers)], strict=False)
        next_microbatch = max(itertools.accumulate(made - freed for made, freed in steps), default=0.0)
    stored = {module: nbytes for module, nbytes in stored.items() if nbytes}
    return Activations(stored, temporary, logits, next_microbatch * work.tokens)


def _text_layers(local: LocalSizes, numbers: Sequence[int], slots: float) -> list[LayerActivations]:
    """Return the activations of the text layers with the indices `numbers`, including adapters, in the same order."""
    dims, training = local.dims, local.training
    by_number: dict[int, LayerActivations] = {}
    for same_kind in group_layers_by_kind(dims, numbers):
        first = same_kind[0]
        linear, moe, ngrams = (
            first in dims.indices.get(name, ()) for name in ("linear_layers", "moe_layers", "ple_layers")
        )
        layer = _text_layer(local, moe=moe, slots=slots if linear else None)
        if ngrams:
            layer = layer._replace(saved=saved_by_ngram_embedding(local) | layer.saved)
        adapted: list[str] = []
        if training.lora is not None:
            sizes = adapter_sizes(dims, first)
            adapted = [name for name in sizes if name in training.lora.targets]
            layer = _add_adapters(local, layer, {name: sizes[name][1] for name in adapted})
        if training.overlaps_experts:
            # Schedule nodes pass on copies: norms' inputs if they are cast, and the shared expert's output.
            copies = 2 * (local.norm_e != local.e) + (moe and "shared_ffn" in dims.sizes)
            layer = layer._replace(saved=layer.saved | {"passed between schedule nodes": copies * local.h * local.e})
        by_number |= dict.fromkeys(same_kind, layer)
        if training.lora is not None and first == 0 and training.recompute.granularity is None:
            # No gradient is needed before the first adapter of the model. (Recomputation needs one everywhere.)
            inputs = ("router: input", *(end for n in adapted for end in (f"{n}: input", f"input of {n}")))
            names = list(layer.saved)
            begin = next((i for i, name in enumerate(names) if name.endswith(inputs)), len(names))
            later = {name: layer.saved[name] for name in names[begin:]}
            by_number[0] = layer._replace(saved={"layer's input": layer.input * local.kernels, **later})
    if (fp8 := training.fp8) is not None and numbers:
        in_chunk = range(numbers[0], numbers[-1] + 1)
        for number in fp8.select_layers(in_chunk, len(dims.indices["text_layers"])):
            layer = by_number[number]
            names = [n for n in _LINEAR_INPUTS if n in layer.saved and n.split(":")[0] not in fp8.bf16_linears]
            inputs = {name: layer.saved[name] * fp8.input_bytes / local.e for name in names}
            by_number[number] = layer._replace(saved=layer.saved | inputs)
    return [by_number[number] for number in numbers]


def _text_layer(local: LocalSizes, *, moe: bool, slots: float | None = None) -> LayerActivations:
    """Return the activations of a text layer, without adapters.

    Args:
        moe: True if the layer has experts.
        slots: see `saved_by_linear_attention`; None for full attention.
    """
    dims, layout, kernels = local.dims, local.layout, local.kernels
    mlp = saved_by_moe(local) if moe else saved_by_mlp(local)
    # Gradients are counted in elements per token.
    if slots is None:
        before, attention_gradients = saved_by_attention(local), 0.0
        if local.is_sparse and kernels:
            # Gradients of outputs and queries are in memory together with the larger of these: buffers to sort pairs of
            # queries and blocks; or sorted queries, gradients of keys and values in float32 by piece, and their sums.
            # Source: `models/qwen4_exp/sparse_kernels.py`.
            blocks, pieces = 1 + dims["index_budget"] // dims["index_block"], layout.cp / dims["index_block"]
            pieces += blocks / _PAIRS_OF_PIECE
            of_keys = 2 * local.kv * (pieces * dims["index_block"] * _FLOAT + layout.cp * local.e) + 4 * blocks
            attention_gradients = 2 * local.q + max(_SORTED_PAIR * blocks, of_keys) / local.e
        elif kernels and not local.te:
            # Torch's kernel: gradients of queries (also summed in float32), and of keys and values for each head of
            # queries, which it then sums.
            keys = layout.cp + 0.5 if layout.cp > 1 else 1
            attention_gradients = keys * (2 * local.q + 3 * local.kv) + 2 * local.q
    else:
        before = saved_by_linear_attention(local, slots)
        # For each head: updates and outputs of a chunk, queries, keys and values, and the states between chunks, each
        # recomputed and with its gradient.
        key, value = dims["l_key_dim"], dims["l_value_dim"]
        per_head = 4 * key + 4 * value + 2 * key * value / CHUNK
        if layout.exchanges_states(dims):
            # The first computation of the delta rule also has columns of keys. Meanwhile there are gradients from the
            # second one (queries, keys, values), and zeros as the gradient of the outputs that are not used.
            per_head += 4 * key + 2 * key * key / CHUNK + 3 * key + value + (key + value)
        attention_gradients = dims["l_value_heads"] / layout.tp * per_head
    # Either the gradient of linear_fc1's output, which the fused activation puts in place of what it saved, or those of
    # the factors.
    mlp_gradients = (2 if local.training.fused_activation else 3) * local.ffn
    # What the MLP saved is freed before attention's backward pass.
    largest = max(_expert_buffers(local) if moe else mlp_gradients, attention_gradients - sum(mlp.values()) / local.e)
    if local.streams:
        # The backward pass of a gated residual recomputes normalized streams and gates, and computes their gradients.
        largest = max(largest, 5 * local.residual - sum(mlp.values()) / local.e)
    return LayerActivations(before | mlp, local.residual * local.e, (largest + 2 * local.residual) * local.e)


def _expert_buffers(local: LocalSizes) -> float:
    """Return the temporary elements per token of experts: of the forward or of the backward pass, whichever has more.

    In the backward pass they are gradients. All buffers of the forward pass are in memory at the same time: tokens
    before and after the all-to-all, and outputs before and after they are concatenated or sorted back. Tokens that are
    saved for the backward pass are not counted.
    """
    dims, layout = local.dims, local.layout
    routed = dims["topk"] * local.training.expert_load * local.token
    gradients = routed * (3 * dims["moe_ffn"] + 2 * dims["hidden"] * layout.expert_tp)
    several = dims["experts"] // layout.ep > 1
    # Transformer Engine sorts tokens by expert, and outputs back. Local layers compute one expert after the other and
    # concatenate the outputs.
    copies = (1 + 2 * several if local.te else 2 + several) + (layout.ep > 1) + (not local.saves_input("experts"))
    return max(gradients, routed * dims["hidden"] * layout.expert_tp * copies)


def _add_adapters(local: LocalSizes, layer: LayerActivations, outputs: dict[str, int]) -> LayerActivations:
    """Return the activations of a text layer with LoRA or DoRA adapters added.

    Args:
        outputs: the output size of each linear layer with an adapter, by layer name.
    """
    lora, dims = local.training.lora, local.dims
    assert lora is not None
    saved = {f"adapter of {name}": lora.rank * local.e for name in outputs}  # between its two matrices
    # Inputs gathered from sequence-parallel ranks, unless the backward pass gathers them again. Source: Megatron-Bridge
    # 0.6.2, ParallelLinearAdapter.
    keeps_gathered = {"in_proj"} if lora.regather_inputs else {"in_proj", "linear_qkv", "linear_fc1"}
    # With Transformer Engine in addition to this rank's share; with local layers instead of it.
    gathered = dims["hidden"] - local.h * (not local.te or local.h == dims["hidden"])
    saved |= {f"adapter of {name}: gathered input": gathered * local.e for name in outputs.keys() & keeps_gathered}
    if lora.dora:
        # The sum of both outputs is multiplied by magnitudes, so it is saved, and has two gradients of its size.
        output_bytes = {name: size * local.e for name, size in outputs.items()}
        saved |= {f"adapter of {name}: output": nbytes for name, nbytes in output_bytes.items()}
        # When linear_fc1's gradients are computed, everything after linear_fc1 is freed.
        after_fc1 = ("MLP: output of linear_fc1", "MLP: input of linear_fc2", "adapter of linear_fc2: output")
        freed = sum((layer.saved | saved).get(name, 0) for name in after_fc1)
        widest = max(3 * nbytes - freed * (name == "linear_fc1") for name, nbytes in output_bytes.items())
        layer = layer._replace(gradients=max(layer.gradients, widest + 2 * local.h * local.e))
    return layer._replace(saved=layer.saved | saved)


def _multi_token_prediction(local: LocalSizes, chunk: PipelineChunk, *, loss_in_chunks: bool) -> tuple[float, float]:
    """Return the bytes per token that multi-token prediction stores in a chunk, and its temporary bytes per token.

    Stages after the first receive embedded next tokens together with hidden states. The last stage has the layer, and
    applies the output layer a second time.
    """
    received = local.h * local.e * (not chunk.pre_process)
    if local.streams:  # received as one tensor: next tokens after the streams of each token; both are copied from it
        received += local.residual * local.e * (not chunk.pre_process) + received
    if not chunk.post_process:
        return received, 0.0
    layer = _text_layer(local, moe=bool(local.dims["mtp_experts"]))
    around = saved_around_mtp_layer(local, received=not chunk.pre_process)
    if local.streams:  # full recomputation covers only the layer
        stored, temporary = _apply_recomputation([layer], local.training.recompute)
        stored += sum(around.values())
    else:
        # Full recomputation starts from next tokens, counted in `received` on later stages, and hidden states, which
        # the output layer saves.
        layer = layer._replace(saved=layer.saved | around, input=layer.input * chunk.pre_process)
        stored, temporary = _apply_recomputation([layer], local.training.recompute)
    head = saved_by_output_layer(local, loss_in_chunks=loss_in_chunks)
    head["weighted losses"] = 2 * _FLOAT  # mask and losses, saved by `MTPLossAutoScaler`
    return received + stored + sum(head.values()), temporary


def _vision_tower(local: LocalSizes) -> tuple[float, float, float]:
    """Return the bytes per patch that the tower and the mergers store, and the tower's temporary bytes per patch."""
    hidden, deepstack_layers = local.dims["v_hidden"], len(local.dims.indices["deepstack_mergers"])
    mergers = deepstack_layers * sum(saved_by_patch_merger(local, deepstack=True).values())
    mergers += sum(saved_by_patch_merger(local, deepstack=False).values())
    if Component.VISION_MODEL in local.training.frozen_weights:
        # No vision layer saves its input, so DeepStack mergers save theirs.
        mergers_trained = Component.VISION_PROJECTION not in local.training.frozen_weights
        return 0.0, (mergers + deepstack_layers * hidden * local.e) * mergers_trained, 0.0
    gradients = (2 * local.dims["v_ffn"] / local.layout.tp + 2 * hidden) * local.e
    layer = LayerActivations(saved_by_vision_layer(local), hidden * local.e, gradients)
    layers = [layer] * len(local.dims.indices["vision_layers"])
    tower, temporary = _apply_recomputation(layers, local.training.vision_recompute)
    return tower + sum(saved_by_patch_embedding(local).values()), mergers, temporary


def _loss_temporary(local: LocalSizes, tokens: float, *, loss_in_chunks: bool) -> float:
    """Return the temporary bytes (logits and gradients) while the loss of `tokens` tokens is computed."""
    vocab = local.dims["vocab"] / local.layout.tp
    # Logits, later their gradient, in the model's precision. In float32 models the softmax has the same memory.
    logits = vocab * local.e * (local.e < _FLOAT)
    weight = vocab * local.dims["hidden"] * (Component.LANGUAGE_MODEL not in local.training.frozen_weights)
    # The output weight's gradient of one loss waits for that of multi-token prediction.
    waiting = weight * local.e * local.training.trains_mtp
    if not loss_in_chunks:
        return logits * tokens + waiting
    # In chunks the softmax is temporary too. The weight's gradients are summed in float32, and a chunk's own is
    # computed when its logits are freed.
    softmax, tokens = softmax_bytes(local), local.training.loss_chunk_tokens
    return max((logits + softmax) * tokens, softmax * tokens + weight * local.e) + weight * _FLOAT + waiting


def _apply_recomputation(layers: Sequence[LayerActivations], recompute: Recompute) -> tuple[float, float]:
    """Return the bytes per token (or patch) that `layers` store for the backward pass, and their temporary bytes."""
    if not layers:
        return 0.0, 0.0
    totals, number = [sum(layer.saved.values()) for layer in layers], recompute.num_layers or 1
    gradients = [layer.gradients for layer in layers]
    if recompute.granularity != "full":
        prefixes = tuple(name for module in recompute.modules for name in _FREED_BY_RECOMPUTATION[module])
        freed = [sum(n for name, n in layer.saved.items() if name.startswith(prefixes)) for layer in layers]
        return sum(totals) - sum(freed), max(map(sum, zip(freed, gradients, strict=True)))
    if recompute.method == "block":  # the first `number` layers, each by itself
        groups = [range(i, i + 1) for i in range(min(number, len(layers)))]
        kept, later = sum(totals[number:]), max(gradients[number:], default=0.0)
    else:  # "uniform": all layers in groups of `number`
        groups = [range(begin, min(begin + number, len(layers))) for begin in range(0, len(layers), number)]
        kept, later = 0.0, 0.0
    recomputed = (sum(totals[i] for i in group) + max(gradients[i] for i in group) for group in groups)
    return kept + sum(layers[group[0]].input for group in groups), max(later, *recomputed)
