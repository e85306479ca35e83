"""Fields that every family's configuration has: the type of each, and constraints between them.

What lives here: the check, with the field names of `config.json`. What may not: types of values (`values.py`), fields
specific to one family (`models/*/config_fields.py`), valid settings that a model does not support
(`models/*/config_checks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.config.values import (
    ABOVE_ZERO,
    COUNT,
    EXPERTS,
    NOT_NEGATIVE,
    OBJECT,
    POSITIVE,
    SECTION,
    TEXT,
    TOKEN,
    TRUTH,
    Kind,
    check_value,
    named,
    shown,
)

Fields = Mapping[str, Mapping[str, Kind]]

# Required fields, optional fields, and fields of the text model that may also be null.
_REQUIRED: Fields = {
    "": {"text_config": OBJECT, "vision_config": OBJECT},
    "text_config": {
        **dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads"), POSITIVE),
        "num_hidden_layers": COUNT,
    },
    "vision_config": {
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_heads", "patch_size"), POSITIVE),
        **dict.fromkeys(("temporal_patch_size", "spatial_merge_size", "num_position_embeddings"), POSITIVE),
        "depth": COUNT,
    },
}
_OPTIONAL: Fields = {
    "": {
        "tie_word_embeddings": TRUTH,
        **dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), TOKEN),
    },
    "text_config": {
        "rms_norm_eps": ABOVE_ZERO,
        "hidden_act": TEXT,
        "max_position_embeddings": POSITIVE,
        **dict.fromkeys(("attention_dropout", "initializer_range", "router_aux_loss_coef"), NOT_NEGATIVE),
    },
    "vision_config": {
        **dict.fromkeys(("in_channels", "out_hidden_size"), POSITIVE),
        "hidden_act": TEXT,
        "initializer_range": NOT_NEGATIVE,
    },
}
_NULLABLE: Mapping[str, Kind] = {
    **dict.fromkeys(("head_dim", "moe_intermediate_size", "num_experts_per_tok"), POSITIVE),
    **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
    "rope_theta": ABOVE_ZERO,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT),
}
_ROPE: Mapping[str, Kind] = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "mrope_section": SECTION,
    "mrope_interleaved": TRUTH,
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"), ABOVE_ZERO),
    **dict.fromkeys(("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), ABOVE_ZERO),
    **dict.fromkeys(("partial_rotary_factor", "mscale", "mscale_all_dim"), NOT_NEGATIVE),
    "truncate": TRUTH,
}
# Defaults of transformers.
_OUT_HIDDEN_SIZE = 3584


def check_shared_fields(config: Any, required: Fields, optional: Fields, nullable: Mapping[str, Kind]) -> None:
    """Check the fields of a configuration, each by itself, and the constraints that all families have in common.

    Args:
        config: a `config.json`.
        required: a family's own required fields, by section; the section "" is the file.
        optional: its optional fields.
        nullable: fields of the text configuration that may also be null.

    Raises:
        ValueError: a field is missing, has the wrong type, or is inconsistent with another one; the message names it.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"the configuration is {shown(config)}, expected an object")
    for section in _REQUIRED:
        fields = config[section] if section else config
        for name, kind in {**_REQUIRED[section], **required.get(section, {})}.items():
            if name not in fields:
                raise ValueError(f"lacks the field {named(section, name)}, expected {kind.expected}")
            check_value(section, name, fields[name], kind)
        for name, kind in {**_OPTIONAL[section], **optional.get(section, {})}.items():
            if name in fields:
                check_value(section, name, fields[name], kind)
    text = config["text_config"]
    for name, kind in {**_NULLABLE, **nullable}.items():
        if text.get(name) is not None:
            check_value("text_config", name, text[name], kind)
    check_rope_fields(text)
    _check_heads(text, config["vision_config"])
    check_tower_size(config["vision_config"], text["hidden_size"])


def experts_of(text: Mapping[str, Any]) -> int:
    """Experts of a MoE layer, in the format of the released files or of transformers 5; 0 in a dense model."""
    return text.get("num_experts", text.get("num_local_experts")) or 0


def check_rope_fields(text: Mapping[str, Any]) -> None:
    """Check the rotary settings of a text configuration, in either format.

    Raises:
        ValueError: a field has the wrong type; the message names it.
    """
    for section in ("rope_parameters", "rope_scaling"):
        for name, value in (text.get(section) or {}).items():
            if value is not None and name in _ROPE:
                check_value(f"text_config.{section}", name, value, _ROPE[name])


def check_tower_size(vision: Mapping[str, Any], text_width: int) -> None:
    """Check that a vision tower's output suits the text model; raises ValueError otherwise.

    Args:
        vision: its configuration, whose fields have been checked one by one.
        text_width: hidden size of the text model.
    """
    found = vision.get("out_hidden_size", _OUT_HIDDEN_SIZE)
    if found != text_width:
        raise ValueError(f"vision_config.out_hidden_size is {found}, expected hidden_size {text_width}")
    positions = vision["num_position_embeddings"]
    if math.isqrt(positions) ** 2 != positions:
        raise ValueError(f"vision_config.num_position_embeddings is {positions}, expected the square of a whole number")


def _check_heads(text: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    """Check that heads divide widths and query groups evenly; raises ValueError otherwise."""
    heads = text["num_attention_heads"]
    for name, whole, part, divisor in (
        ("text_config.num_attention_heads", heads, "num_key_value_heads", text.get("num_key_value_heads") or heads),
        ("vision_config.hidden_size", vision["hidden_size"], "num_heads", vision["num_heads"]),
    ):
        if whole % divisor:
            raise ValueError(f"{name} is {whole}, expected a multiple of {part}, which is {divisor}")
