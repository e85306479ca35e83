"""The numbers of a Qwen3.5-VL, read off its Hugging Face configuration.

What lives here: the reading, in every spelling that there is. Standard library only. What may not: parameter names
(`table.py`), whether a configuration is one we honour (`config_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qwen3vl_bridge.weights.dimensions import Dimensions, indices_of, vision_sizes

FAMILY = "qwen3_5"
LINEAR, FULL = "linear_attention", "full_attention"
HEAD_DIM = 256


def layer_types_of(text: Mapping) -> tuple[str, ...]:
    """Which attention each layer has; every so many layers full attention where it is not listed.

    Source: transformers, Qwen3_5TextConfig.
    """
    if text.get("layer_types") is not None:
        return tuple(text["layer_types"])
    interval = text.get("full_attention_interval", 4)
    return tuple(FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(text["num_hidden_layers"]))


def experts_of(text: Mapping) -> int:
    """Experts of each layer; 0 in a dense model."""
    return text.get("num_experts", text.get("num_local_experts")) or 0


def dimensions_of(config: Mapping) -> Dimensions:
    """The numbers that the table's symbols stand for.

    Args:
        config: a Qwen3.5-VL `config.json` as a mapping (`text_config`, `vision_config`, `tie_word_embeddings`).

    Raises:
        KeyError: the mapping lacks a field; the message names it.
    """
    text, vision = config["text_config"], config["vision_config"]
    types, experts, layers = layer_types_of(text), experts_of(text), text["num_hidden_layers"]
    head_dim = text.get("head_dim") or HEAD_DIM
    sizes = {
        "vocab": text["vocab_size"],
        "hidden": text["hidden_size"],
        "ffn": 0 if experts else text["intermediate_size"],
        "head_dim": head_dim,
        "heads": text["num_attention_heads"],
        "kv_heads": text["num_key_value_heads"],
        "q": text["num_attention_heads"] * head_dim,
        "gated_q": 2 * text["num_attention_heads"] * head_dim,
        "kv": text["num_key_value_heads"] * head_dim,
        "experts": experts,
        "chosen_experts": text["num_experts_per_tok"] if experts else 0,
        "moe_ffn": text["moe_intermediate_size"] if experts else 0,
        "moe_gate_up": 2 * text["moe_intermediate_size"] if experts else 0,
        "shared_ffn": text["shared_expert_intermediate_size"] if experts else 0,
        "untied": int(not config.get("tie_word_embeddings", False)),
        **_linear_sizes(text),
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
    """`Dimensions.indices` of both kinds of layers, by what is said of each layer."""
    linear = tuple(layer for layer, one in enumerate(is_linear) if one)
    return {"linear_layers": linear, "full_layers": tuple(layer for layer, one in enumerate(is_linear) if not one)}


def _linear_sizes(text: Mapping) -> dict[str, int]:
    """Those of linear attention. Source of the defaults: transformers, Qwen3_5TextConfig."""
    return linear_sizes(
        key_heads=text.get("linear_num_key_heads", 16),
        key_dim=text.get("linear_key_head_dim", 128),
        value_heads=text.get("linear_num_value_heads", 32),
        value_dim=text.get("linear_value_head_dim", 128),
        conv=text.get("linear_conv_kernel_dim", 4),
    )


def linear_sizes(*, key_heads: int, key_dim: int, value_heads: int, value_dim: int, conv: int) -> dict[str, int]:
    """Sizes of linear attention by its heads, their widths, and the taps of its convolution."""
    key, value = key_heads * key_dim, value_heads * value_dim
    return {
        "l_key": key,
        "l_key_dim": key_dim,
        "l_value": value,
        "l_value_dim": value_dim,
        "l_value_heads": value_heads,
        "l_qkv": 2 * key + value,
        "l_conv": conv,
    }
