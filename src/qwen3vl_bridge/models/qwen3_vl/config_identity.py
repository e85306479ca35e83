"""The fields of a configuration that identify a Qwen3-VL model, normalized over file formats.

What lives here: fields specific to Qwen3-VL, or with a spelling specific to it; of a `config.json`, and of the provider
in a run's `run_config.yaml`, Megatron-Bridge's or ours. Standard library only. What may not: fields of all families
(`models/config/identity.py`), refusals (`config_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.config.fields import experts_of
from qwen3vl_bridge.models.config.identity import TOKEN_IDS, WIDTH, renamed, shared_fields, shared_fields_of_run
from qwen3vl_bridge.models.qwen3_vl.config_checks import rope_parameters
from qwen3vl_bridge.models.qwen3_vl.config_dimensions import head_dim_of, moe_layers_of

# Defaults. Source: transformers, Qwen3VLConfig.
_TOKENS: Mapping[str, int] = dict(zip(TOKEN_IDS, (151_655, 151_656, 151_652, 151_653), strict=True))
_CHOSEN = ("num_experts_per_tok", "moe_intermediate_size")
_PLAIN_ROPE = ("rope_type", "rope_theta", "mrope_section")
_WITH_EXPERTS = "text_config.layers with experts (decoder_sparse_step, mlp_only_layers)"
_ROPE = "text_config.rope_parameters"
# Fields with the same value in every model, and duplicates of `rope_type`.
_ONE_WAY = ("type", "mrope_interleaved", "partial_rotary_factor")


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json`, normalized."""
    found = shared_fields(config, {"": _TOKENS})
    found["vision_config.deepstack_visual_indexes"] = list(config["vision_config"]["deepstack_visual_indexes"])
    return found | {f"text_config.{name}": value for name, value in _text_fields(config["text_config"]).items()}


def _text_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    moe_layers = list(moe_layers_of(text))
    found = {
        "num_key_value_heads": text["num_key_value_heads"] or text["num_attention_heads"],
        "head_dim": head_dim_of(text),
        "num_experts": experts_of(text),
    }
    if len(moe_layers) < text["num_hidden_layers"]:  # otherwise no layer has this width
        found["intermediate_size"] = text["intermediate_size"]
    if moe_layers:
        found |= {name: text.get(name) for name in _CHOSEN}
        found["layers with experts (decoder_sparse_step, mlp_only_layers)"] = moe_layers
    rope = rope_parameters(text)
    names = _PLAIN_ROPE if rope["rope_type"] == "default" else rope
    values = {name: rope[name] for name in names if rope[name] is not None}
    values["mrope_section"] = list(values["mrope_section"])
    return found | {f"rope_parameters.{name}": value for name, value in values.items()}


def fields_of_run(model: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in the `model` section of a run's file; arguments as for `shared_fields_of_run`."""
    found = shared_fields_of_run(model, config, dense="qwen3_vl", with_experts="qwen3_vl_moe")
    if model.get("num_moe_experts"):
        found |= _layers_with_experts(model)
    return found | {f"{_ROPE}.{name}": value for name, value in _rope(model).items()}


def _layers_with_experts(model: Mapping[str, Any]) -> dict[str, Any]:
    """Indices of the layers with experts, and the width of the others if there are any."""
    layers, frequency = model.get("num_layers"), model.get("moe_layer_freq", 1)
    if type(frequency) is int and type(layers) is int and frequency > 0:
        found = list(range(0, layers, frequency))
    elif isinstance(frequency, list):
        found = [layer for layer, has_experts in enumerate(frequency) if has_experts]
    else:
        return {}
    return {_WITH_EXPERTS: found, **(renamed(model, WIDTH) if len(found) != layers else {})}


def _rope(model: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-Bridge stores a scaled rotary embedding in the text configuration, we in a field."""
    text = model.get("hf_text_config")
    scaled = text.get("rope_parameters") or text.get("rope_scaling") if isinstance(text, Mapping) else None
    scaled = scaled or model.get("rope_parameters")
    found = renamed(model, {"rotary_base": "rope_theta", "mrope_section": "mrope_section"})
    if isinstance(scaled, Mapping) and (kind := scaled.get("rope_type") or scaled.get("type")):
        plain = kind in ("default", "mrope")
        named = {name: value for name, value in scaled.items() if name not in _ONE_WAY and value is not None}
        return found | ({"rope_type": "default"} if plain else named)
    if "rope_parameters" in model or isinstance(text, Mapping):
        found["rope_type"] = "default"
    return found
