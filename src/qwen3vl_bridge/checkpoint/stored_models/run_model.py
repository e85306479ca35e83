"""The model that a run's `run_config.yaml` describes, by the names that `config.json` has.

What lives here: which field of a provider, Megatron-Bridge's or ours, says what of the model. What may not: reading the
file (`checkpoint/adapters/settings.py`), what else a configuration may say (`config_comparison.py`).

A file of another release may lack any of the fields, and is not asked about those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Fields of a provider -> those of a `config.json` that have the same value.
_SAME: Mapping[str, str] = {
    "share_embeddings_and_output_weights": "tie_word_embeddings",
    **{name: name for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")},
    "hidden_size": "text_config.hidden_size",
    "num_layers": "text_config.num_hidden_layers",
    "num_attention_heads": "text_config.num_attention_heads",
    "num_query_groups": "text_config.num_key_value_heads",
    "kv_channels": "text_config.head_dim",
    "layernorm_epsilon": "text_config.rms_norm_eps",
}
_SAME_WITH_EXPERTS: Mapping[str, str] = {
    "num_moe_experts": "text_config.num_experts",
    "moe_router_topk": "text_config.num_experts_per_tok",
    "moe_ffn_hidden_size": "text_config.moe_intermediate_size",
}
_WITH_EXPERTS = "text_config.layers with experts (decoder_sparse_step, mlp_only_layers)"
_ROPE = "text_config.rope_parameters"
# What has one value in every model, or is `rope_type` once more.
_ONE_WAY = ("type", "mrope_interleaved", "partial_rotary_factor")
# Functions by the last part of the name that a file gives them. Of others nothing is known.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "relu": "relu", "gelu_tanh": "gelu_pytorch_tanh"}


def model_of_run(model: Mapping[str, Any]) -> dict[str, Any]:
    """What the `model` section of a run's file says of the model, as far as it says something.

    How many tokens there are is told by the tensors themselves, and which of them are padding by their rows.

    Args:
        model: fields of a provider.

    Returns:
        Fields of the text model, by the names and in the spelling of `config_comparison.py`.
    """
    found = _named(model, _SAME)
    if "num_moe_experts" in model:
        found["model_type"] = "qwen3_vl_moe" if model["num_moe_experts"] else "qwen3_vl"
        found |= _experts(model)
    activation = model.get("activation_func")
    if isinstance(activation, Mapping):
        name = _ACTIVATIONS.get(str(activation.get("_target_")).rpartition(".")[2])
        found |= {} if name is None else {"text_config.hidden_act": name}
    return found | {f"{_ROPE}.{name}": value for name, value in _rope(model).items()}


def _named(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {other: fields[name] for name, other in names.items() if fields.get(name) is not None}


def _experts(model: Mapping[str, Any]) -> dict[str, Any]:
    width = _named(model, {"ffn_hidden_size": "text_config.intermediate_size"})
    if not model["num_moe_experts"]:
        return {"text_config.num_experts": 0, **width}
    found = _named(model, _SAME_WITH_EXPERTS)
    layers, frequency = model.get("num_layers"), model.get("moe_layer_freq", 1)
    if type(frequency) is int and type(layers) is int and frequency > 0:
        found[_WITH_EXPERTS] = list(range(0, layers, frequency))
    elif isinstance(frequency, list):
        found[_WITH_EXPERTS] = [layer for layer, has_experts in enumerate(frequency) if has_experts]
    if _WITH_EXPERTS in found and len(found[_WITH_EXPERTS]) != layers:  # else no layer has that width
        found |= width
    return found


def _rope(model: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-Bridge has a scaled rotary embedding in the text configuration beside its fields, ours among them."""
    text = model.get("hf_text_config")
    scaled = text.get("rope_parameters") or text.get("rope_scaling") if isinstance(text, Mapping) else None
    scaled = scaled or model.get("rope_parameters")
    found = _named(model, {"rotary_base": "rope_theta", "mrope_section": "mrope_section"})
    if isinstance(scaled, Mapping) and (kind := scaled.get("rope_type") or scaled.get("type")):
        plain = kind in ("default", "mrope")
        named = {name: value for name, value in scaled.items() if name not in _ONE_WAY and value is not None}
        return found | ({"rope_type": "default"} if plain else named)
    if "rope_parameters" in model or isinstance(text, Mapping):
        found["rope_type"] = "default"
    return found
