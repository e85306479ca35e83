"""Which model a Qwen3.5-VL configuration describes: the fields that decide it, whichever way a file spells them.

What lives here: every field that decides which tensors there are or what they mean, by the names that `config.json`
has; of a `config.json`, and of the provider in a run's `run_config.yaml`. Standard library only. What may not:
comparing two (`checkpoint/stored_models/config_comparison.py`), what is refused (`config_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.qwen3_5.config_checks import rope_parameters
from qwen3vl_bridge.models.qwen3_5.config_dimensions import FULL, HEAD_DIM, experts_of, layer_types_of

# Fields by section, with what transformers takes where a file has none; a field without that is in every file.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "": {
        "model_type": None,
        "tie_word_embeddings": False,
        "image_token_id": 248_056,
        "video_token_id": 248_057,
        "vision_start_token_id": 248_053,
        "vision_end_token_id": 248_054,
    },
    "text_config": {
        **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")),
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "head_dim": HEAD_DIM,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "vision_config": {
        **dict.fromkeys(("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size")),
        **dict.fromkeys(("temporal_patch_size", "spatial_merge_size", "num_position_embeddings")),
        "out_hidden_size": 3584,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_VISION = "vision_config."
_LAYERS = "text_config.layers with full attention (layer_types, full_attention_interval)"
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
    "rotary_base": "text_config.rope_parameters.rope_theta",
    "rotary_percent": "text_config.rope_parameters.partial_rotary_factor",
    "mrope_section": "text_config.rope_parameters.mrope_section",
    **{
        f"linear_{name}": f"text_config.linear_{name}"
        for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    },
}
_SAME_WITH_EXPERTS: Mapping[str, str] = {
    "num_moe_experts": "text_config.num_experts",
    "moe_router_topk": "text_config.num_experts_per_tok",
    "moe_ffn_hidden_size": "text_config.moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "text_config.shared_expert_intermediate_size",
}


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json`, each in one spelling."""
    found: dict[str, Any] = {}
    for section, fields in _FIELDS.items():
        values = config[section] if section else config
        prefix = f"{section}." if section else ""
        found |= {prefix + name: values.get(name, default) for name, default in fields.items()}
    text = config["text_config"]
    if found["text_config.hidden_act"] == "swish":  # another name of it
        found["text_config.hidden_act"] = "silu"
    found["text_config.head_dim"] = found["text_config.head_dim"] or HEAD_DIM
    found["text_config.num_experts"] = experts_of(text)
    names = _OF_EXPERTS if experts_of(text) else ("intermediate_size",)
    found |= {f"text_config.{name}": text[name] for name in names}
    found[_LAYERS] = [layer for layer, kind in enumerate(layer_types_of(text)) if kind == FULL]
    rope = rope_parameters(text)
    rope["mrope_section"] = list(rope["mrope_section"])
    return found | {f"text_config.rope_parameters.{name}": value for name, value in rope.items()}


def fields_of_run(model: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What the `model` section of a run's file says of the model, as far as it says something.

    Args:
        model: fields of a provider.
        config: `fields_of` a configuration; no other field of the tower is told.
    """
    found = _named(model, _SAME)
    if "num_moe_experts" in model:
        experts = model["num_moe_experts"] or 0
        found |= {"model_type": "qwen3_5_moe" if experts else "qwen3_5", "text_config.num_experts": experts}
        dense = {"ffn_hidden_size": "text_config.intermediate_size"}
        found |= _named(model, _SAME_WITH_EXPERTS if experts else dense)
    pattern, layers = model.get("linear_attention_freq"), model.get("num_layers")
    if isinstance(pattern, list):
        found[_LAYERS] = [layer for layer, is_linear in enumerate(pattern) if not is_linear]
    elif type(pattern) is int and type(layers) is int and pattern > 0:
        found[_LAYERS] = list(range(pattern - 1, layers, pattern))
    if isinstance(vision := model.get("vision_config"), Mapping):
        names = (name for name in config if name.startswith(_VISION) and name.removeprefix(_VISION) in vision)
        found |= {name: vision[name.removeprefix(_VISION)] for name in names}
    vocabulary, named = model.get("vocab_size"), "text_config.vocab_size"
    if type(vocabulary) is int and vocabulary < config[named]:
        found[named] = vocabulary
    return found


def _named(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {other: fields[name] for name, other in names.items() if fields.get(name) is not None}
