"""The fields of a configuration that identify a Qwen3.5-VL model, normalized over file formats.

What lives here: fields specific to Qwen3.5-VL, or with a spelling specific to it; of a `config.json`, and of the
provider in a run's `run_config.yaml`. Standard library only. What may not: fields of all families
(`models/config/identity.py`), refusals (`config_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.config.fields import experts_of
from qwen3vl_bridge.models.config.identity import TOKEN_IDS, renamed, shared_fields, shared_fields_of_run
from qwen3vl_bridge.models.qwen3_5.config_checks import rope_parameters
from qwen3vl_bridge.models.qwen3_5.config_dimensions import FULL, HEAD_DIM, LINEAR_SIZES, layer_types_of

# Fields by section, with transformers' defaults.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "": dict(zip(TOKEN_IDS, (248_056, 248_057, 248_053, 248_054), strict=True)),
    "text_config": {"num_key_value_heads": None, "head_dim": HEAD_DIM, **LINEAR_SIZES},
}
_SHARED_EXPERT = "shared_expert_intermediate_size"
_OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", _SHARED_EXPERT)
_LAYERS = "text_config.layers with full attention (layer_types, full_attention_interval)"
# Maps a provider's fields to the fields of `config.json` with the same value.
_SAME: Mapping[str, str] = {
    "rotary_base": "text_config.rope_parameters.rope_theta",
    "rotary_percent": "text_config.rope_parameters.partial_rotary_factor",
    "mrope_section": "text_config.rope_parameters.mrope_section",
    **{name: f"text_config.{name}" for name in LINEAR_SIZES},
}


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json`, normalized."""
    found, text = shared_fields(config, _FIELDS), config["text_config"]
    found["text_config.head_dim"] = found["text_config.head_dim"] or HEAD_DIM
    found["text_config.num_experts"] = experts_of(text)
    names = _OF_EXPERTS if experts_of(text) else ("intermediate_size",)
    found |= {f"text_config.{name}": text[name] for name in names}
    found[_LAYERS] = [layer for layer, kind in enumerate(layer_types_of(text)) if kind == FULL]
    rope = rope_parameters(text)
    rope["mrope_section"] = list(rope["mrope_section"])
    return found | {f"text_config.rope_parameters.{name}": value for name, value in rope.items()}


def fields_of_run(model: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in the `model` section of a run's file; arguments as for `shared_fields_of_run`."""
    found = shared_fields_of_run(model, config, dense="qwen3_5", with_experts="qwen3_5_moe") | renamed(model, _SAME)
    if model.get("num_moe_experts"):
        found |= renamed(model, {f"moe_{_SHARED_EXPERT}": f"text_config.{_SHARED_EXPERT}"})
    pattern, layers = model.get("linear_attention_freq"), model.get("num_layers")
    if isinstance(pattern, list):
        found[_LAYERS] = [layer for layer, is_linear in enumerate(pattern) if not is_linear]
    elif type(pattern) is int and type(layers) is int and pattern > 0:
        found[_LAYERS] = list(range(pattern - 1, layers, pattern))
    return found
