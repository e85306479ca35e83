"""Fields of a Qwen3-VL configuration: the type of each, and constraints between them.

What lives here: the check, with the field names of `config.json`. Standard library only. What may not: fields shared by
all families (`models/config/fields.py`), valid settings that this model does not support (`config_checks.py`), derived
values (`config_dimensions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.config.fields import Fields, check_shared_fields
from qwen3vl_bridge.models.config.values import LAYERS, POSITIVE, Kind, shown

# In addition to the fields of all families: required fields, optional fields, and fields that may also be null.
_REQUIRED: Fields = {
    "text_config": {"intermediate_size": POSITIVE},
    "vision_config": {"deepstack_visual_indexes": LAYERS},
}
_OPTIONAL: Fields = {"text_config": {"decoder_sparse_step": POSITIVE}}
_NULLABLE: Mapping[str, Kind] = {"num_key_value_heads": POSITIVE, "mlp_only_layers": LAYERS}


def check_fields(config: Any) -> None:
    """Check every field that determines which tensors exist, or what they mean.

    Args:
        config: a Qwen3-VL `config.json`.

    Raises:
        ValueError: a field is missing, has the wrong type, or is inconsistent with another one; the message names it.
    """
    check_shared_fields(config, _REQUIRED, _OPTIONAL, _NULLABLE)
    text = config["text_config"]
    if "num_key_value_heads" not in text:  # transformers' default fits no released model
        raise ValueError("lacks the field text_config.num_key_value_heads, expected a number or null")
    check_taps(config["vision_config"], text["num_hidden_layers"])


def check_taps(vision: Mapping[str, Any], text_layers: int) -> None:
    """Check that a vision tower's DeepStack features suit the text model.

    Args:
        vision: its configuration, whose fields have been checked one by one.
        text_layers: number of layers of the text model.

    Raises:
        ValueError: taps that are not layers of the tower, or more taps than text layers.
    """
    taps, layers = list(vision["deepstack_visual_indexes"]), vision["depth"]
    if taps != sorted(set(taps)) or (taps and not 0 <= taps[0] <= taps[-1] < layers):
        raise ValueError(f"deepstack_visual_indexes is {shown(taps)}, expected ascending layers below {layers}")
    if len(taps) > text_layers:
        raise ValueError(f"{len(taps)} DeepStack taps need as many text layers, num_layers is {text_layers}")
