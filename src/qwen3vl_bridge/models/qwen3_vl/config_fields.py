"""Fields of a Qwen3-VL configuration: which kind of value each has, and which values go together.

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
    LAYERS,
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

# Fields that must be there, those that may be left out, and those that may also be null.
_REQUIRED: Mapping[str, Mapping[str, Kind]] = {
    "": {"text_config": OBJECT, "vision_config": OBJECT},
    "text_config": {
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"), POSITIVE),
        "num_hidden_layers": COUNT,
    },
    "vision_config": {
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_heads", "patch_size"), POSITIVE),
        **dict.fromkeys(("temporal_patch_size", "spatial_merge_size", "num_position_embeddings"), POSITIVE),
        "depth": COUNT,
        "deepstack_visual_indexes": LAYERS,
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
        "decoder_sparse_step": POSITIVE,
        **dict.fromkeys(("attention_dropout", "initializer_range", "router_aux_loss_coef"), NOT_NEGATIVE),
    },
    "vision_config": {
        **dict.fromkeys(("in_channels", "out_hidden_size"), POSITIVE),
        "hidden_act": TEXT,
        "initializer_range": NOT_NEGATIVE,
    },
}
_NULLABLE: Mapping[str, Kind] = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts_per_tok"), POSITIVE),
    **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
    "mlp_only_layers": LAYERS,
    "rope_theta": ABOVE_ZERO,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT),
}


def check_fields(config: Any) -> None:
    """Check every field that decides which tensors there are, or what they mean.

    Args:
        config: a Qwen3-VL `config.json`.

    Raises:
        ValueError: a field is missing, of another kind, or does not go with another one; the message names it.
    """
    check_sections(config, _REQUIRED, _OPTIONAL, _NULLABLE)
    text = config["text_config"]
    if "num_key_value_heads" not in text:  # transformers has a number for it that fits nobody
        raise ValueError("lacks the field text_config.num_key_value_heads, expected a number or null")
    check_rope_fields(text)
    check_heads(text, config["vision_config"])
    check_tower(config["vision_config"], text["hidden_size"], text["num_hidden_layers"])


def check_tower(vision: Mapping[str, Any], text_width: int, text_layers: int) -> None:
    """Check that a vision tower is one that a text model can take features of.

    Args:
        vision: its configuration, each field by itself as it should be.
        text_width: hidden size of the text model.
        text_layers: its layers.

    Raises:
        ValueError: widths, positions or DeepStack taps that do not fit.
    """
    check_tower_size(vision, text_width)
    taps, layers = list(vision["deepstack_visual_indexes"]), vision["depth"]
    if taps != sorted(set(taps)) or (taps and not 0 <= taps[0] <= taps[-1] < layers):
        raise ValueError(f"deepstack_visual_indexes is {shown(taps)}, expected ascending layers below {layers}")
    if len(taps) > text_layers:
        raise ValueError(f"{len(taps)} DeepStack taps need as many text layers, num_layers is {text_layers}")
