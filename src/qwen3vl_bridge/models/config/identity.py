"""The fields of a configuration that identify a model, in all families, normalized over file formats.

What lives here: fields that determine which tensors exist or what they mean, with the names of `config.json`; of a
`config.json`, and of the provider in a run's `run_config.yaml`. What may not: fields specific to one family
(`models/*/config_identity.py`), comparing two configurations (`checkpoint/stored_models/config_comparison.py`),
refusals (`models/*/config_checks.py`).

A `run_config.yaml` of another release may lack any of the fields; these are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
# Fields by section, with transformers' defaults; a field without a default is in every file.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "": {"model_type": None, "tie_word_embeddings": False},
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
# Maps a provider's fields to the fields of `config.json` with the same value.
_SAME: Mapping[str, str] = {
    "share_embeddings_and_output_weights": "tie_word_embeddings",
    **{name: name for name in TOKEN_IDS},
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
WIDTH: Mapping[str, str] = {"ffn_hidden_size": "text_config.intermediate_size"}
# Functions by the last part of their name in a file. Other functions are unknown.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "relu": "relu", "gelu_tanh": "gelu_pytorch_tanh"}


def shared_fields(config: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of a `config.json` that every family has, normalized.

    Args:
        config: the file.
        own: further fields of the family with a single spelling, by section as in `_FIELDS`.
    """
    found: dict[str, Any] = {}
    for section, fields in _FIELDS.items():
        values = config[section] if section else config
        prefix = f"{section}." if section else ""
        wanted = {**fields, **own.get(section, {})}
        found |= {prefix + name: values.get(name, default) for name, default in wanted.items()}
    if found["text_config.hidden_act"] == "swish":  # another name for it
        found["text_config.hidden_act"] = "silu"
    return found


def shared_fields_of_run(
    model: Mapping[str, Any], config: Mapping[str, Any], *, dense: str, with_experts: str
) -> dict[str, Any]:
    """The fields in the `model` section of a run's file that every family has, as far as they are given.

    The vocabulary's size is known from the tensors themselves, and its padding from their rows: so a vocabulary larger
    than the configuration's is left out.

    Args:
        model: fields of a provider.
        config: all fields of a configuration; no other field of the tower is used.
        dense, with_experts: `model_type` of models without experts, and of those with.
    """
    found = renamed(model, _SAME)
    if "num_moe_experts" in model:
        experts = model["num_moe_experts"] or 0
        found |= {"model_type": with_experts if experts else dense, "text_config.num_experts": experts}
        found |= renamed(model, _SAME_WITH_EXPERTS if experts else WIDTH)
    activation = model.get("activation_func")
    if isinstance(activation, Mapping):
        name = _ACTIVATIONS.get(str(activation.get("_target_")).rpartition(".")[2])
        found |= {} if name is None else {"text_config.hidden_act": name}
    if isinstance(vision := model.get("vision_config"), Mapping):
        names = (name for name in config if name.startswith(_VISION) and name.removeprefix(_VISION) in vision)
        found |= {name: vision[name.removeprefix(_VISION)] for name in names}
    vocabulary, tokens = model.get("vocab_size"), "text_config.vocab_size"
    if type(vocabulary) is int and vocabulary < config[tokens]:
        found[tokens] = vocabulary
    return found


def renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The fields that exist, under other names; null counts as missing."""
    return {other: fields[name] for name, other in names.items() if fields.get(name) is not None}
