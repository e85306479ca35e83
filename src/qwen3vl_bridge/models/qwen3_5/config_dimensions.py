"""Dimensions of a Qwen3.5-VL model, read from its Hugging Face configuration.

What lives here: reading them, in every format of the configuration. Standard library only. What may not: parameter
names (`table.py`), whether a configuration is supported (`config_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qwen3vl_bridge.models.config.fields import experts_of
from qwen3vl_bridge.weights.dimensions import Dimensions, indices_of, text_sizes, vision_sizes

FAMILY = "qwen3_5"
LINEAR, FULL = "linear_attention", "full_attention"
HEAD_DIM = 256
MTP_LAYERS = "mtp_num_hidden_layers"  # a field of text configurations
# Sizes of linear attention, with the defaults for files without them. Source: transformers, Qwen3_5TextConfig.
LINEAR_SIZES: Mapping[str, int] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def layer_types_of(text: Mapping) -> tuple[str, ...]:
    """The attention type of each layer; if not listed, every n-th layer has full attention.

    Source: transformers, Qwen3_5TextConfig.
    """
    if text.get("layer_types") is not None:
        return tuple(text["layer_types"])
    interval = text.get("full_attention_interval", 4)
    return tuple(FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(text["num_hidden_layers"]))


def dimensions_of(config: Mapping) -> Dimensions:
    """Values of the weight table's symbols.

    Args:
        config: a Qwen3.5-VL `config.json` as a mapping (`text_config`, `vision_config`, `tie_word_embeddings`).

    Raises:
        KeyError: a field is missing; the message names it.
    """
    text, vision = config["text_config"], config["vision_config"]
    types, experts, layers = layer_types_of(text), experts_of(text), text["num_hidden_layers"]
    shared = text_sizes(
        vocab=text["vocab_size"],
        hidden=text["hidden_size"],
        ffn=0 if experts else text["intermediate_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text.get("head_dim") or HEAD_DIM,
        untied=not config.get("tie_word_embeddings", False),
        experts=experts,
        chosen_experts=text["num_experts_per_tok"] if experts else 0,
        moe_ffn=text["moe_intermediate_size"] if experts else 0,
    )
    sizes = {
        **shared,
        "gated_q": 2 * shared["q"],
        "shared_ffn": text["shared_expert_intermediate_size"] if experts else 0,
        **linear_sizes(text),
        **mtp_sizes(text.get(MTP_LAYERS), text["hidden_size"], experts),
        **vision_sizes(vision),
    }
    indices = indices_of(
        layers=layers,
        moe_layers=tuple(range(layers)) if experts else (),
        experts=experts,
        vision_layers=vision["depth"],
    )
    return Dimensions(sizes, indices | layers_by_attention([kind == LINEAR for kind in types]), FAMILY)


def layers_by_attention(is_linear: Sequence[bool | int]) -> dict[str, tuple[int, ...]]:
    """`Dimensions.indices` of both attention types, from a list with the type of each layer."""
    linear = tuple(layer for layer, one in enumerate(is_linear) if one)
    return {"linear_layers": linear, "full_layers": tuple(layer for layer, one in enumerate(is_linear) if not one)}


def mtp_sizes(layers: int | None, hidden: int, experts: int) -> dict[str, int]:
    """Sizes and conditions for the table rows of multi-token prediction.

    Args:
        layers: 1, or 0 or None for a model without multi-token prediction.
        hidden: size of hidden states.
        experts: experts per layer; 0 for a dense model.
    """
    there = int(bool(layers))
    return {
        "mtp": there,
        "mtp_dense": int(there and not experts),
        "mtp_experts": int(there and bool(experts)),
        "hidden_twice": 2 * hidden,
    }


def linear_sizes(found: Mapping[str, int]) -> dict[str, int]:
    """Sizes of linear attention from the fields in `LINEAR_SIZES`, all of which are optional."""
    sizes = {name: found.get(name, default) for name, default in LINEAR_SIZES.items()}
    key_dim, value_dim = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
    key, value = sizes["linear_num_key_heads"] * key_dim, sizes["linear_num_value_heads"] * value_dim
    return {
        "l_key": key,
        "l_key_dim": key_dim,
        "l_value": value,
        "l_value_dim": value_dim,
        "l_value_heads": sizes["linear_num_value_heads"],
        "l_qkv": 2 * key + value,
        "l_conv": sizes["linear_conv_kernel_dim"],
    }
