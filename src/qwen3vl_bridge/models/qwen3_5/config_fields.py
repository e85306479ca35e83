"""Fields of a Qwen3.5-VL configuration: which kind of value each has, and which values go together.

What lives here: the check, with the names that `config.json` has. Standard library only. What may not: kinds of value
(`models/config_values.py`), well-formed settings that this model does not compute (`config_checks.py`), what
follows from the values (`config_dimensions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.config_values import (
    ABOVE_ZERO,
    COUNT,
    EXPERTS,
    NOT_NEGATIVE,
    OBJECT,
    POSITIVE,
    TEXT,
    TOKEN,
    TRUTH,
    Kind,
    check_heads,
    check_rope_fields,
    check_sections,
    check_tower_size,
    shown,
)
from qwen3vl_bridge.models.qwen3_5.config_dimensions import FULL, LINEAR, experts_of, layer_types_of

_TYPES = Kind(
    lambda value: isinstance(value, list | tuple) and all(isinstance(one, str) for one in value), "a list of names"
)
_ANY = Kind(lambda value: isinstance(value, list | tuple), "a list")

# Fields that must be there, those that may be left out, and those that may also be null.
_REQUIRED: Mapping[str, Mapping[str, Kind]] = {
    "": {"text_config": OBJECT, "vision_config": OBJECT},
    "text_config": {
        **dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads"), POSITIVE),
        "num_hidden_layers": COUNT,
    },
    "vision_config": {
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_heads", "patch_size"), POSITIVE),
        **dict.fromkeys(("temporal_patch_size", "spatial_merge_size", "num_position_embeddings"), POSITIVE),
        "depth": COUNT,
    },
}
_OPTIONAL: Mapping[str, Mapping[str, Kind]] = {
    "": {
        "tie_word_embeddings": TRUTH,
        **dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), TOKEN),
    },
    "text_config": {
        "rms_norm_eps": ABOVE_ZERO,
        "hidden_act": TEXT,
        "max_position_embeddings": POSITIVE,
        "full_attention_interval": POSITIVE,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"), POSITIVE),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), POSITIVE),
        **dict.fromkeys(("attention_dropout", "initializer_range", "router_aux_loss_coef"), NOT_NEGATIVE),
    },
    "vision_config": {
        **dict.fromkeys(("in_channels", "out_hidden_size"), POSITIVE),
        "hidden_act": TEXT,
        "initializer_range": NOT_NEGATIVE,
    },
}
_NULLABLE: Mapping[str, Kind] = {
    **dict.fromkeys(("head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok"), POSITIVE),
    "shared_expert_intermediate_size": POSITIVE,
    **dict.fromkeys(("num_experts", "num_local_experts", "mtp_num_hidden_layers"), EXPERTS),
    "layer_types": _TYPES,
    "mlp_only_layers": _ANY,
    "rope_theta": ABOVE_ZERO,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT),
}
_OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def check_fields(config: Any) -> None:
    """Check every field that decides which tensors there are, or what they mean.

    Args:
        config: a Qwen3.5-VL `config.json`.

    Raises:
        ValueError: a field is missing, of another kind, or does not go with another one; the message names it.
    """
    check_sections(config, _REQUIRED, _OPTIONAL, _NULLABLE)
    text = config["text_config"]
    check_rope_fields(text)
    check_heads(text, config["vision_config"])
    check_tower_size(config["vision_config"], text["hidden_size"])
    _check_layers(text)
    experts = experts_of(text)
    for name in _OF_EXPERTS if experts else ("intermediate_size",):
        if text.get(name) is None:
            raise ValueError(f"lacks the field text_config.{name}, expected a number: the model has {experts} experts")
    if experts and text["num_experts_per_tok"] > experts:
        raise ValueError(
            f"text_config.num_experts_per_tok is {text['num_experts_per_tok']}, expected 1 to {experts}, the experts"
        )


def _check_layers(text: Mapping[str, Any]) -> None:
    types, layers = layer_types_of(text), text["num_hidden_layers"]
    if len(types) != layers or not {LINEAR, FULL}.issuperset(types):
        raise ValueError(
            f"text_config.layer_types is {shown(list(types))}, expected {layers} times {LINEAR!r} or {FULL!r}"
        )
    value_heads, key_heads = text.get("linear_num_value_heads", 32), text.get("linear_num_key_heads", 16)
    if value_heads % key_heads:
        raise ValueError(
            f"text_config.linear_num_value_heads is {value_heads}, expected a multiple of linear_num_key_heads, "
            f"which is {key_heads}"
        )
