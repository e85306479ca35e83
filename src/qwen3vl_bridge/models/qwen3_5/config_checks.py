"""Checks of settings in a Qwen3.5-VL configuration that change results: each is supported, or refused here.

What lives here: the check, and the normalized rotary settings. Standard library only, so that a converter can use it
too. What may not: checks of single fields (`config_fields.py`), sizes (`config_dimensions.py`), the translation of
supported settings (`bridge.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.config.checks import check_shared_settings
from qwen3vl_bridge.models.config.fields import experts_of
from qwen3vl_bridge.models.qwen3_5.config_dimensions import HEAD_DIM
from qwen3vl_bridge.models.qwen3_5.config_fields import check_fields

_WITH_EXPERTS = {"qwen3_5": False, "qwen3_5_moe": True}  # by model_type
# Defaults of transformers for files without these fields. Source: Qwen3_5TextConfig.
_ROPE: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
}


def check_settings(config: Mapping[str, Any]) -> None:
    """Refuse settings that this model does not support.

    Args:
        config: a Qwen3.5-VL `config.json` as a mapping.

    Raises:
        ValueError: a setting that would otherwise be ignored, or a field with an invalid value; the message names it.
    """
    check_fields(config)
    text = config["text_config"]
    taps = list(config["vision_config"].get("deepstack_visual_indexes") or ())
    own = {
        "text_config.attn_output_gate": (text.get("attn_output_gate", True), True),
        # Either every layer has experts, or none has.
        "text_config.mlp_only_layers": (list(text.get("mlp_only_layers") or ()), []),
        "text_config.mtp_use_dedicated_embeddings": (text.get("mtp_use_dedicated_embeddings") or False, False),
        "vision_config.deepstack_visual_indexes": (taps, []),
    }
    check_shared_settings(config, own)
    rope_parameters(text)
    experts = experts_of(text)
    if bool(experts) != _WITH_EXPERTS.get(str(config.get("model_type")), bool(experts)):
        raise ValueError(f"{experts} experts, which model_type {config['model_type']} does not allow")


def rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of a text configuration, in the format of transformers 5 and with its defaults.

    Returns:
        `rope_type`, `rope_theta`, `partial_rotary_factor`, `mrope_section`.

    Raises:
        ValueError: a type of rotary embedding that this model does not support, or a section of the wrong size.
    """
    given = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise ValueError(f"rope_type is {kind!r}, expected 'default'")
    if not given.get("mrope_interleaved", True):
        raise ValueError("mrope_interleaved is False, expected True as in every Qwen3.5-VL")
    found = {
        name: next((one for one in (given.get(name), text.get(name)) if one is not None), default)
        for name, default in _ROPE.items()
    }
    found["rope_type"] = "default"
    turning = int((text.get("head_dim") or HEAD_DIM) * found["partial_rotary_factor"])
    if 2 * sum(found["mrope_section"]) != turning:
        raise ValueError(
            f"mrope_section is {list(found['mrope_section'])} with the sum {sum(found['mrope_section'])}, expected "
            f"half of the {turning} dimensions of a head that partial_rotary_factor turns"
        )
    return found
