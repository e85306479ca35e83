"""Checks of settings in a Qwen3-VL configuration that change results: each is supported, or refused here.

What lives here: the check, and the normalized rotary settings. Standard library only, so that a converter can use it
too. What may not: checks of single fields (`config_fields.py`), sizes (`config_dimensions.py`), the translation of
supported settings (`bridge.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.config.checks import check_shared_settings
from qwen3vl_bridge.models.config.fields import check_rope_fields, experts_of
from qwen3vl_bridge.models.qwen3_vl.config_dimensions import head_dim_of, moe_layers_of
from qwen3vl_bridge.models.qwen3_vl.config_fields import check_fields

# Rotary embeddings whose frequencies do not depend on a batch's length.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_WITH_EXPERTS = {"qwen3_vl": False, "qwen3_vl_moe": True}  # by model_type


def check_settings(config: Mapping[str, Any]) -> None:
    """Refuse settings that this model does not support.

    Args:
        config: a Qwen3-VL `config.json` as a mapping.

    Raises:
        ValueError: a setting that would otherwise be ignored, or a field with an invalid value; the message names it.
    """
    check_fields(config)
    check_shared_settings(config, {})
    text = config["text_config"]
    _check_mrope(text)
    _check_experts(text)
    layers = len(moe_layers_of(text))
    if bool(layers) != _WITH_EXPERTS.get(str(config.get("model_type")), bool(layers)):
        raise ValueError(f"{layers} layers have experts, which model_type {config['model_type']} does not allow")


def _check_mrope(text: Mapping[str, Any]) -> None:
    section, head_dim = rope_parameters(text)["mrope_section"], head_dim_of(text)
    if 2 * sum(section) != head_dim:
        raise ValueError(
            f"mrope_section is {list(section)} with the sum {sum(section)}, expected half of text_config's head_dim, "
            f"{head_dim}"
        )


def _check_experts(text: Mapping[str, Any]) -> None:
    experts, chosen = experts_of(text), text.get("num_experts_per_tok")
    if not experts:
        return
    if not isinstance(chosen, int) or not 0 < chosen <= experts:
        raise ValueError(f"text_config.num_experts_per_tok is {chosen!r}, expected 1 to {experts}, the experts")
    if len({text[name] for name in ("num_experts", "num_local_experts") if text.get(name)}) > 1:
        raise ValueError(
            f"text_config.num_experts is {text['num_experts']}, num_local_experts {text['num_local_experts']}: "
            "expected the same number"
        )
    if not moe_layers_of(text):
        raise ValueError(
            f"text_config has {experts} experts and no layer that uses them: decoder_sparse_step is "
            f"{text.get('decoder_sparse_step', 1)}, mlp_only_layers {text.get('mlp_only_layers')}"
        )
    if text.get("moe_intermediate_size") is None:
        raise ValueError("text_config lacks moe_intermediate_size, expected the width of an expert")


def rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of a text configuration, in the format of transformers 5.

    Returns:
        `rope_type`, `rope_theta`, `mrope_section`, and the parameters of a scaled type.

    Raises:
        ValueError: a type of rotary embedding that this model does not support, or a parameter that is missing or has
            the wrong type.
    """
    check_rope_fields(text)
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    kind = rope.pop("type", None)
    kind = rope.get("rope_type") or kind or "default"
    rope["rope_type"] = "default" if kind == "mrope" else kind
    if rope["rope_type"] not in _ROPE_TYPES:
        raise ValueError(f"rope_type is {kind!r}, expected one of {', '.join(_ROPE_TYPES)}")
    if not rope.get("mrope_interleaved", True):
        raise ValueError("mrope_interleaved is False, expected True as in every Qwen3-VL")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor is {rope['partial_rotary_factor']}, expected 1.0")
    rope.setdefault("rope_theta", text.get("rope_theta"))
    if rope["rope_type"] in ("yarn", "llama3"):  # as transformers does
        rope.setdefault("original_max_position_embeddings", text.get("max_position_embeddings"))
    needed = ("rope_theta", "mrope_section", *(() if rope["rope_type"] == "default" else ("factor",)))
    for name in needed:
        if rope.get(name) is None:
            raise ValueError(f"text_config has no {name}, neither in rope_parameters nor in text_config itself")
    return rope
