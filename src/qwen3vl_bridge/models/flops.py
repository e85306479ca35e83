"""FLOPs of a sample in each of the two towers: of a forward pass, or of a training step.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import Dimensions, is_of_mtp

CHUNK = 64  # chunk size of gated delta rule kernels, in tokens


@dataclass(frozen=True)
class TowerCosts:
    """Multiplications and additions. Of a forward pass, unless stated otherwise.

    Only matrix products are counted, as in PaLM (arXiv 2204.02311, appendix B), and half of the causal attention, which
    is all that its kernels compute. Recomputation to save memory is not counted: these are the model's FLOPs.
    """

    token: float  # of the language model, for each token
    token_pair: float  # of its attention, for the square of a sample's tokens
    patch: float  # of the vision tower and its mergers, for each patch
    patch_pair: float  # of its attention, for the square of a frame's patches

    def of(self, *, tokens: int, patches: int, patch_pairs: int, token_pairs: int | None = None) -> float:
        """The cost of one sample; or of several, with the sum of their squared numbers of tokens as `token_pairs`.

        `patch_pairs` is the sum over frames of the squared number of patches.
        """
        token_pairs = tokens**2 if token_pairs is None else token_pairs
        language = self.token * tokens + self.token_pair * token_pairs
        return language + self.patch * patches + self.patch_pair * patch_pairs


@dataclass(frozen=True)
class Trained:
    """What is trained, which determines what a backward pass has to compute. The vision projection is the mergers."""

    # Whether that part's own weights are trained.
    language_model: bool = True
    vision_model: bool = True
    vision_projection: bool = True
    # Rank of a linear layer's adapter, by the layer's name in the Megatron model, which is the same for all experts of
    # a layer; 0 for none. Adapters are trained.
    rank: Callable[[str], int] = field(default=lambda layer: 0)
    # Whether there is a loss of multi-token prediction. Its layer is a part of the language model, and gets no
    # adapters.
    mtp: bool = False


class _Chain:
    """Consecutive layers, and how far back a gradient has to be computed.

    A linear layer's forward pass, the gradient of its input and the gradient of its weight have the same number of
    FLOPs. The first is always computed, the second if something before the layer is trained, the third if the layer is
    trained.
    """

    def __init__(self, trained: Trained, reached: bool = False) -> None:
        self.trained, self.reached, self.linear, self.pair = trained, reached, 0.0, 0.0

    def add(self, name: str, inputs: int, outputs: int, trained: bool, times: float = 1) -> None:
        """Add a linear layer of these sizes, applied `times` per token (or patch); "" cannot have an adapter."""
        rank = self.trained.rank(name) if name and not is_of_mtp(name) else 0
        self.linear += times * inputs * outputs * (1 + self.reached + trained)
        if rank:
            self.linear += times * rank * (inputs * (2 + self.reached) + 3 * outputs)
        self.reached = self.reached or trained or rank > 0

    def attend(self, width: int) -> None:
        """Add attention with heads of this total width: both of its products, for each pair of tokens."""
        self.pair += 2 * width * (1 + 2 * self.reached)


def tower_costs(config: Mapping, trained: Trained | None = None) -> TowerCosts:
    """The costs of the model of a `config.json`, for a step that trains something or (None) for only a forward pass.
    Raises KeyError for a missing field.
    """
    return model_costs(dimensions_of(config), trained)


def model_costs(dims: Dimensions, trained: Trained | None = None) -> TowerCosts:
    """Like `tower_costs`, for a model with these dimensions."""
    trained = trained or Trained(False, False, False)
    vision, (*deepstack, embedded) = _vision(dims, trained)
    of_language = trained.language_model
    text = _Chain(trained, reached=embedded or of_language)  # the embedding comes before all layers
    for layer in dims.indices["text_layers"]:
        name = f"language_model.decoder.layers.{layer}"
        if layer in dims.indices.get("linear_layers", ()):
            _add_linear_attention(text, f"{name}.self_attention", dims, of_language)
        else:
            _add_attention(text, f"{name}.self_attention", dims, of_language)
        _add_mlp(text, f"{name}.mlp", dims, of_language, moe=layer in dims.indices["moe_layers"])
        text.reached = text.reached or any(deepstack[layer : layer + 1])  # DeepStack features
    text.add("", dims["hidden"], dims["vocab"], of_language)
    if trained.mtp:
        name = "language_model.mtp.layers.0.mtp_model_layer"
        text.add("", dims["hidden_twice"], dims["hidden"], of_language)
        _add_attention(text, f"{name}.self_attention", dims, of_language)
        _add_mlp(text, f"{name}.mlp", dims, of_language, moe=bool(dims["mtp_experts"]))
        text.add("", dims["hidden"], dims["vocab"], of_language)
    # Causal attention is half of all pairs.
    return TowerCosts(token=2 * text.linear, token_pair=text.pair, patch=2 * vision.linear, patch_pair=2 * vision.pair)


def _add_attention(text: _Chain, name: str, dims: Dimensions, trained: bool) -> None:
    """Add full attention, with a gate for each query if the family has gates."""
    text.add(f"{name}.linear_qkv", dims["hidden"], dims.sizes.get("gated_q", dims["q"]) + 2 * dims["kv"], trained)
    text.attend(dims["q"])
    text.add(f"{name}.linear_proj", dims["q"], dims["hidden"], trained)


def _add_mlp(text: _Chain, name: str, dims: Dimensions, trained: bool, *, moe: bool) -> None:
    """Add a layer's MLP; or its router, the experts of one token, and the shared expert with its gate."""
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
    """Add a layer of linear attention, whose FLOPs are proportional to the tokens.

    The gated delta rule by chunks, as in kernels. For each token and value head three products with the state of key
    size times value size (the value stored under the key, the update, the output), and within a chunk as many as it has
    tokens: of keys with keys, queries and the solution of the chunk's triangular system; of values with this solution
    and with the queries' scores. Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2025), section 3.3;
    transformers, torch_chunk_gated_delta_rule, for the matrix products.
    """
    keys, values = dims["l_value_heads"] * dims["l_key_dim"], dims["l_value"]
    text.add(f"{name}.in_proj", dims["hidden"], dims["l_qkv"] + dims["l_value"] + 2 * dims["l_value_heads"], trained)
    text.add("", dims["l_conv"], dims["l_qkv"], trained)
    rule = 3 * dims["l_key_dim"] * values + CHUNK * (3 * keys + 2 * values)
    text.linear += rule * (1 + 2 * text.reached)
    text.add(f"{name}.out_proj", dims["l_value"], dims["hidden"], trained)


def trained_parts(provider: Any) -> Trained:
    """The trained parts, without adapters."""
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
    """FLOPs of a global batch, which Megatron-Bridge asks for to log TFLOP/s.

    It passes no patches, but has arguments for the keys of cross attention, and their products with the queries. Our
    step fills these (`training/metrics.py`) with patches, and squares of frames' patches, so nothing is estimated. Rows
    (`batch_size`) count as full if nothing else is known. Under LoRA Megatron-Bridge uses its own formula.

    Args:
        seqlen_sum, seqlen_squared_sum: real tokens, and squares of segments' real tokens.
        cross_seqlen_sum, cross_seqlen_product_sum: patches, and squares of frames' patches.
    """
    if seqlen_sum is None or seqlen_squared_sum is None:
        seqlen_sum, seqlen_squared_sum = batch_size * provider.seq_length, batch_size * provider.seq_length**2
    return model_costs(provider.dimensions(), trained_parts(provider)).of(
        tokens=seqlen_sum,
        token_pairs=seqlen_squared_sum,
        patches=cross_seqlen_sum or 0,
        patch_pairs=cross_seqlen_product_sum or 0,
    )


def _vision(dims: Dimensions, trained: Trained) -> tuple[_Chain, list[bool]]:
    """The tower with its mergers, per patch; and whether mergers need a gradient, DeepStack's first."""
    of_tower, of_mergers = trained.vision_model, trained.vision_projection
    share = dims["v_hidden"] / dims["v_merged"]  # fraction of a token that one patch is
    tower, mergers = _Chain(trained), list[_Chain]()

    def merge(name: str) -> None:
        merger = _Chain(trained, tower.reached or of_mergers)  # its norm comes before its linear layers
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
