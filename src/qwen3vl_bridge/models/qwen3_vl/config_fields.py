"""Fields of a Qwen3-VL configuration: which kind of value each has, and which values go together.

What lives here: the check, with the names that `config.json` has. Standard library only. What may not: fields of all
families (`models/config/fields.py`), well-formed settings that this model does not compute (`config_checks.py`), what
follows from the values (`config_dimensions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.config.fields import Fields, check_shared_fields
from qwen3vl_bridge.models.config.values import LAYERS, POSITIVE, Kind, shown

# Beside those of all families: fields that must be there, those that may be left out, and those that may also be null.
_REQUIRED: Fields = {
    "text_config": {"intermediate_size": POSITIVE},
    "vision_config": {"deepstack_visual_indexes": LAYERS},
}
_OPTIONAL: Fields = {"text_config": {"decoder_sparse_step": POSITIVE}}
_NULLABLE: Mapping[str, Kind] = {"num_key_value_heads": POSITIVE, "mlp_only_layers": LAYERS}


def check_fields(config: Any) -> None:
    """Check every field that decides which tensors there are, or what they mean.

    Args:
        config: a Qwen3-VL `config.json`.

    Raises:
        ValueError: a field is missing, of another kind, or does not go with another one; the message names it.
    """
    check_shared_fields(config, _REQUIRED, _OPTIONAL, _NULLABLE)
    text = config["text_config"]
    if "num_key_value_heads" not in text:  # transformers has a number for it that fits nobody
        raise ValueError("lacks the field text_config.num_key_value_heads, expected a number or null")
    check_taps(config["vision_config"], text["num_hidden_layers"])


def check_taps(vision: Mapping[str, Any], text_layers: int) -> None:
    """Check that a vision tower's DeepStack features are ones that a text model can take.

    Args:
        vision: its configuration, each field by itself as it should be.
        text_layers: layers of the text model.

    Raises:
        ValueError: taps that are no layers, or more than the text model has.
    """
    taps, layers = list(vision["deepstack_visual_indexes"]), vision["depth"]
    if taps != sorted(set(taps)) or (taps and not 0 <= taps[0] <= taps[-1] < layers):
        raise ValueError(f"deepstack_visual_indexes is {shown(taps)}, expected ascending layers below {layers}")
    if len(taps) > text_layers:
        raise ValueError(f"{len(taps)} DeepStack taps need as many text layers, num_layers is {text_layers}")
