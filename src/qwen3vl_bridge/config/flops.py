"""Compute the FLOPs of a sample in the vision tower and the language model, for a forward pass or a training step.

Uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import Dimensions, is_mtp

CHUNK = 64  # chunk size of gated delta rule kernels, in tokens


@dataclass(frozen=True)
class TowerCosts:
    """FLOPs of the language model per token, and of the vision tower per patch.

    Only matrix products are counted, as in PaLM (arXiv 2204.02311, appendix B). For causal attention, half of all pairs
    of tokens are counted, because kernels compute only these. Recomputed activations are not counted.
    """

    token: float  # language model, per token
    token_pair: float  # attention of the language model, per squared number of tokens in a sample
    patch: float  # vision tower and mergers, per patch
    patch_pair: float  # attention of the vision tower, per squared number of patches in a frame
    # Sparse attention (QSA), in which a token attends to at most `budget` tokens: FLOPs per attended pair of tokens. A
    # kernel may compute further pairs, which are not counted. With sparse attention, `token_pair` is for the indexer.
    sparse_pair: float = 0.0
    budget: int = 0  # tokens; 0 without sparse attention

    def count_flops(self, *, tokens: int, patches: int, patch_pairs: int, token_pairs: int | None = None) -> float:
        """Return the FLOPs of one or several samples.

        Args:
            tokens: number of tokens.
            patches: number of patches.
            patch_pairs: sum over all frames of the squared number of patches in the frame.
            token_pairs: sum over all samples of the squared number of tokens in the sample; None for one sample.
        """
        token_pairs = tokens**2 if token_pairs is None else token_pairs
        language = self.token * tokens + self.token_pair * token_pairs
        language += self.sparse_pair * self._attended_pairs(tokens, token_pairs)
        return language + self.patch * patches + self.patch_pair * patch_pairs

    def plus(self, other: TowerCosts) -> TowerCosts:
        """Return the summed costs of two passes of one model, such as a forward pass and a training step."""
        names = ("token", "token_pair", "patch", "patch_pair", "sparse_pair")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def _attended_pairs(self, tokens: int, token_pairs: int) -> float:
        """Return the number of attended pairs among `token_pairs`, if a token attends to at most `budget` tokens.

        A sample of n tokens has n**2 pairs. If n > `budget`, 2 n * `budget` - `budget`**2 of these pairs are attended.
        If there are several samples, all are assumed to have the mean length, weighted by tokens. If their lengths
        differ, the result is higher than the sum over samples.
        """
        if token_pairs <= self.budget * tokens:
            return token_pairs
        return self.budget * tokens * (2 - self.budget * tokens / token_pairs)


@dataclass(frozen=True)
class Trained:
    """The weights that are trained. They determine the FLOPs of a backward pass."""

    # True if the component's own weights are trained. The vision projection consists of the patch mergers.
    language_model: bool = True
    vision_model: bool = True
    vision_projection: bool = True
    # Returns the rank of the adapter of a linear layer by the layer's name, or 0 without an adapter. All experts of a
    # layer share one name. Adapters are trained.
    rank: Callable[[str], int] = field(default=lambda layer: 0)
    # True if multi-token prediction is trained. Its layer belongs to the language model and has no adapters.
    mtp: bool = False


class _Chain:
    """Sums the FLOPs of consecutive layers, in a forward pass or a training step.

    In a linear layer, the forward pass, the gradient of the input and the gradient of the weight have equal FLOPs. The
    gradient of the input is computed only if an earlier layer is trained (`reached`), the gradient of the weight only
    if the layer itself is trained.
    """

    def __init__(self, trained: Trained, reached: bool = False) -> None:
        self.trained, self.reached, self.linear, self.pair, self.sparse_pair = trained, reached, 0.0, 0.0, 0.0

    def add(self, name: str, inputs: int, outputs: int, trained: bool, times: float = 1) -> None:
        """Add the FLOPs of a linear layer and of its adapter, applied `times` times per token or patch.

        Args:
            name: the layer's name, by which `Trained.rank` finds the rank of its adapter; "" for no adapter.
            inputs, outputs: numbers of inputs and outputs of the layer.
            trained: whether the layer's own weight is trained.
            times: number of applications.
        """
        rank = self.trained.rank(name) if name and not is_mtp(name) else 0
        self.linear += times * inputs * outputs * (1 + self.reached + trained)
        if rank:
            self.linear += times * rank * (inputs * (2 + self.reached) + 3 * outputs)
        self.reached = self.reached or trained or rank > 0

    def attend(self, width: int, *, sparse: bool = False) -> None:
        """Add the FLOPs of the two matrix products of attention.

        They are counted per pair of tokens. If `sparse` is True, they are counted per pair of a query and a token that
        it attends to. `width` is the sum of all head sizes.
        """
        flops = 2 * width * (1 + 2 * self.reached)
        if sparse:
            self.sparse_pair += flops
        else:
            self.pair += flops


def tower_costs(config: Mapping, trained: Trained | None = None) -> TowerCosts:
    """Return the FLOPs of a model per token and per patch.

    Args:
        config: contents of the model's `config.json`.
        trained: the weights that a training step trains; None for a forward pass.

    Raises:
        KeyError: a field is missing.
    """
    return model_costs(dimensions_of(config), trained)


def model_costs(dims: Dimensions, trained: Trained | None = None) -> TowerCosts:
    """Return the FLOPs per token and per patch of a model with dimensions `dims`; see `tower_costs`."""
    trained = trained or Trained(False, False, False)
    vision, (*deepstack, embedded) = _vision(dims, trained)
    of_language = trained.language_model
    text = _Chain(trained, reached=embedded or of_language)  # the embedding comes before all layers
    for layer in dims.indices["text_layers"]:
        name = f"language_model.decoder.layers.{layer}"
        if layer in dims.indices.get("ple_layers", ()):
            _add_ngram_embedding(text, dims, of_language)
        _add_gated_residual(text, dims, of_language)
        if layer in dims.indices.get("linear_layers", ()):
            _add_linear_attention(text, f"{name}.self_attention", dims, of_language)
        else:
            _add_attention(text, f"{name}.self_attention", dims, of_language)
        _add_gated_residual(text, dims, of_language)
        _add_mlp(text, f"{name}.mlp", dims, of_language, moe=layer in dims.indices["moe_layers"])
        text.reached = text.reached or any(deepstack[layer : layer + 1])  # DeepStack features
    _add_gated_residual(text, dims, of_language, injects=False)
    text.add("", dims["hidden"], dims["vocab"], of_language)
    if trained.mtp:
        name = "language_model.mtp.layers.0.mtp_model_layer"
        # The embedding of the next token is projected, and so is each residual stream.
        text.add("", dims["hidden"], dims["hidden"], of_language, times=1 + dims.sizes.get("streams", 1))
        _add_gated_residual(text, dims, of_language)
        _add_attention(text, f"{name}.self_attention", dims, of_language)
        _add_gated_residual(text, dims, of_language)
        _add_mlp(text, f"{name}.mlp", dims, of_language, moe=bool(dims["mtp_experts"]))
        _add_gated_residual(text, dims, of_language, injects=False)
        text.add("", dims["hidden"], dims["vocab"], of_language)
    # A multiplication and an addition are two FLOPs, but causal attention has half of all pairs: `pair` is not doubled.
    return TowerCosts(
        token=2 * text.linear,
        token_pair=text.pair,
        patch=2 * vision.linear,
        patch_pair=2 * vision.pair,
        sparse_pair=text.sparse_pair,
        budget=dims.sizes.get("index_budget", 0),
    )


def _add_attention(text: _Chain, name: str, dims: Dimensions, trained: bool) -> None:
    """Add the FLOPs of full attention. Include the gates of queries and the indexer if the family has them.

    The indexer is never trained. Its scores are products of index queries and the keys of blocks of tokens. For short
    samples the indexer is not run, but its FLOPs are counted.
    """
    text.add(f"{name}.linear_qkv", dims["hidden"], dims.sizes.get("gated_q", dims["q"]) + 2 * dims["kv"], trained)
    sparse = bool(dims.sizes.get("index_budget"))
    if sparse:
        text.linear += dims["hidden"] * dims["index_qk"]
        text.pair += (dims["index_qk"] - dims["index_dim"]) / dims["index_block"]
    text.attend(dims["q"], sparse=sparse)
    text.add(f"{name}.linear_proj", dims["q"], dims["hidden"], trained)


def _add_gated_residual(text: _Chain, dims: Dimensions, trained: bool, *, injects: bool = True) -> None:
    """Add the FLOPs of a gated residual, if the family has gated residuals.

    A gated residual has a low-rank projection and, with `injects`, a projection to the factors with which the output
    of a block is added to the residual streams.
    """
    if streams := dims.sizes.get("streams"):
        text.add("", dims["streams_hidden"], dims["lowrank"], trained)
        text.add("", dims["lowrank"], dims["streams_hidden"], trained)
        text.add("", dims["streams_hidden"], streams * injects, trained)


def _add_ngram_embedding(text: _Chain, dims: Dimensions, trained: bool) -> None:
    """Add the FLOPs of a per-layer n-gram embedding: the projections of keys and values, and the convolution.

    If the language model is trained, gradients of the looked-up rows of the n-gram table are counted, even if the table
    is frozen.
    """
    projected = dims["ple_dim"] * (dims["streams_hidden"] + dims["hidden"])
    text.linear += projected * (1 + 2 * trained)
    text.add("", dims["ple_conv"], dims["streams_hidden"], trained)


def _add_mlp(text: _Chain, name: str, dims: Dimensions, trained: bool, *, moe: bool) -> None:
    """Add the FLOPs of a dense MLP or, if `moe` is True, of an MoE layer.

    An MoE layer has a router, the experts that a token is routed to, and the gated shared expert if the model has one.
    """
    if not moe:
        text.add(f"{name}.linear_fc1", dims["hidden"], 2 * dims["ffn"], trained)
        text.add(f"{name}.linear_fc2", dims["ffn"], dims["hidden"], trained)
        return
    text.add("", dims["hidden"], dims["experts"], trained)
    text.add(f"{name}.experts.linear_fc1", dims["hidden"], 2 * dims["moe_ffn"], trained, times=dims["topk"])
    text.add(f"{name}.experts.linear_fc2", dims["moe_ffn"], dims["hidden"], trained, times=dims["topk"])
    if shared := dims.sizes.get("shared_ffn", 0):
        text.add("", dims["hidden"], 1, trained)
        text.add(f"{name}.shared_experts.linear_fc1", dims["hidden"], 2 * shared, trained)
        text.add(f"{name}.shared_experts.linear_fc2", shared, dims["hidden"], trained)


def _add_linear_attention(text: _Chain, name: str, dims: Dimensions, trained: bool) -> None:
    """Add the FLOPs of linear attention, which computes the gated delta rule in chunks of `CHUNK` tokens.

    For each token and value head, three products involve the state of [key size, value size]: reading the value under
    the key, updating the state, and computing the output. Each token also has products with all tokens of its chunk:
    keys with keys, with queries and with the solution of the chunk's triangular system; values with this solution and
    with the scores of queries. The FLOPs are proportional to the number of tokens.

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2025), section 3.3; transformers,
    torch_chunk_gated_delta_rule, for the matrix products.
    """
    keys, values = dims["l_value_heads"] * dims["l_key_dim"], dims["l_value"]
    text.add(f"{name}.in_proj", dims["hidden"], dims["l_qkv"] + dims["l_value"] + 2 * dims["l_value_heads"], trained)
    text.add("", dims["l_conv"], dims["l_qkv"], trained)
    rule = 3 * dims["l_key_dim"] * values + CHUNK * (3 * keys + 2 * values)
    text.linear += rule * (1 + 2 * text.reached)
    text.add(f"{name}.out_proj", dims["l_value"], dims["hidden"], trained)


def trained_parts(provider: Any) -> Trained:
    """Return which components a provider trains, according to its `freeze_*` settings. Adapters are ignored."""
    return Trained(
        language_model=not provider.freeze_language_model,
        vision_model=not provider.freeze_vision_model,
        vision_projection=not provider.freeze_vision_projection,
        mtp=provider.trains_mtp,
    )


def operations_of_a_step(
    provider: Any,
    *,
    batch_size: int,
    seqlen_sum: int | None = None,
    seqlen_squared_sum: int | None = None,
    cross_seqlen_sum: int | None = None,
    cross_seqlen_product_sum: int | None = None,
) -> float:
    """Return the FLOPs of a global batch, for Megatron-Bridge's log of TFLOP/s.

    Megatron-Bridge has no arguments for patches, so `training/metrics.py` passes patches as arguments for cross
    attention.

    Args:
        provider: the model.
        batch_size: number of rows.
        seqlen_sum: number of tokens without padding; None: all rows are full.
        seqlen_squared_sum: sum over all segments of the squared number of tokens; None: all rows are full.
        cross_seqlen_sum: number of patches.
        cross_seqlen_product_sum: sum over all frames of the squared number of patches.
    """
    if seqlen_sum is None or seqlen_squared_sum is None:
        seqlen_sum, seqlen_squared_sum = batch_size * provider.seq_length, batch_size * provider.seq_length**2
    return model_costs(provider.dimensions(), trained_parts(provider)).count_flops(
        tokens=seqlen_sum,
        token_pairs=seqlen_squared_sum,
        patches=cross_seqlen_sum or 0,
        patch_pairs=cross_seqlen_product_sum or 0,
    )


def _vision(dims: Dimensions, trained: Trained) -> tuple[_Chain, list[bool]]:
    """Return the FLOPs of the vision tower, and for each patch merger whether gradients reach its output.

    The DeepStack mergers come first, the main merger last.
    """
    of_tower, of_mergers = trained.vision_model, trained.vision_projection
    share = dims["v_hidden"] / dims["v_merged"]  # tokens per patch
    tower, mergers = _Chain(trained), list[_Chain]()

    def merge(name: str) -> None:
        merger = _Chain(trained, tower.reached or of_mergers)  # the trained norm comes before the linear layers
        merger.add(f"{name}.linear_fc1", dims["v_merged"], dims["v_merged"], of_mergers)
        merger.add(f"{name}.linear_fc2", dims["v_merged"], dims["hidden"], of_mergers)
        mergers.append(merger)

    tower.add("", dims["v_channels"] * dims["v_temporal_patch"] * dims["v_patch"] ** 2, dims["v_hidden"], of_tower)
    for layer in dims.indices["vision_layers"]:
        name = f"vision_model.decoder.layers.{layer}"
        tower.add(f"{name}.self_attention.linear_qkv", dims["v_hidden"], dims["v_qkv"], of_tower)
        tower.attend(dims["v_hidden"])
        tower.add(f"{name}.self_attention.linear_proj", dims["v_hidden"], dims["v_hidden"], of_tower)
        tower.add(f"{name}.mlp.linear_fc1", dims["v_hidden"], dims["v_ffn"], of_tower)
        tower.add(f"{name}.mlp.linear_fc2", dims["v_ffn"], dims["v_hidden"], of_tower)
        if layer in dims.indices["deepstack_layers"]:
            merge(f"vision_model.decoder.deepstack_merger_list.{len(mergers)}")
    merge("vision_model.merger")
    tower.linear += share * sum(merger.linear for merger in mergers)
    return tower, [merger.reached for merger in mergers]
