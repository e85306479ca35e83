"""Which model a configuration describes: the fields that decide it, whichever way a file spells them.

What lives here: every field that decides which tensors there are or what they mean, by the names that `config.json`
has; of a `config.json`, and of the provider in a run's `run_config.yaml`, Megatron-Bridge's or ours. Standard library
only. What may not: comparing two (`checkpoint/stored_models/config_comparison.py`), what is refused
(`config_checks.py`).

A `run_config.yaml` of another release may lack any of the fields, and is not asked about those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.qwen3_vl.config_checks import rope_parameters
from qwen3vl_bridge.models.qwen3_vl.config_dimensions import experts_of, head_dim_of, moe_layers_of

# Fields by section, with what transformers takes where a file has none; a field without that is in every file.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "": {
        "model_type": None,
        "tie_word_embeddings": False,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    },
    "text_config": {
        **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    },
    "vision_config": {
        **dict.fromkeys(("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size")),
        **dict.fromkeys(("temporal_patch_size", "spatial_merge_size", "num_position_embeddings")),
        "out_hidden_size": 3584,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_VISION = "vision_config."
_CHOSEN = ("num_experts_per_tok", "moe_intermediate_size")
_PLAIN_ROPE = ("rope_type", "rope_theta", "mrope_section")
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


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json`, each in one spelling."""
    found: dict[str, Any] = {}
    for section, fields in _FIELDS.items():
        values = config[section] if section else config
        prefix = f"{section}." if section else ""
        found |= {prefix + name: values.get(name, default) for name, default in fields.items()}
    if found["text_config.hidden_act"] == "swish":  # another name of it
        found["text_config.hidden_act"] = "silu"
    text = config["text_config"]
    found["vision_config.deepstack_visual_indexes"] = list(config["vision_config"]["deepstack_visual_indexes"])
    return found | {f"text_config.{name}": value for name, value in _text_fields(text).items()}


def _text_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    moe_layers = list(moe_layers_of(text))
    found = {
        "num_key_value_heads": text["num_key_value_heads"] or text["num_attention_heads"],
        "head_dim": head_dim_of(text),
        "num_experts": experts_of(text),
    }
    if len(moe_layers) < text["num_hidden_layers"]:  # else no layer has that width
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
    """What the `model` section of a run's file says of the model, as far as it says something.

    How many tokens there are is told by the tensors themselves, and which of them are padding by their rows: so of a
    vocabulary larger than the configuration's nothing is said.

    Args:
        model: fields of a provider.
        config: `fields_of` a configuration; no other field of the tower is told.
    """
    found = _named(model, _SAME)
    if "num_moe_experts" in model:
        found["model_type"] = "qwen3_vl_moe" if model["num_moe_experts"] else "qwen3_vl"
        found |= _experts(model)
    activation = model.get("activation_func")
    if isinstance(activation, Mapping):
        name = _ACTIVATIONS.get(str(activation.get("_target_")).rpartition(".")[2])
        found |= {} if name is None else {"text_config.hidden_act": name}
    found |= {f"{_ROPE}.{name}": value for name, value in _rope(model).items()}
    if isinstance(vision := model.get("vision_config"), Mapping):
        names = (name for name in config if name.startswith(_VISION) and name.removeprefix(_VISION) in vision)
        found |= {name: vision[name.removeprefix(_VISION)] for name in names}
    vocabulary, named = model.get("vocab_size"), "text_config.vocab_size"
    if type(vocabulary) is int and vocabulary < config[named]:
        found[named] = vocabulary
    return found


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
