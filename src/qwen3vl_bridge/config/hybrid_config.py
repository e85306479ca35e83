"""Read the `config.json` of hybrid models, whose text layers have linear or full attention (Qwen3.5 and later).

Uses only the standard library. Source of the defaults: transformers, Qwen3_5TextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qwen3vl_bridge.config import hf_config
from qwen3vl_bridge.config.hf_config import POSITIVE, TOKEN_IDS, Fields, Kind, experts_of, renamed, shown
from qwen3vl_bridge.weights.rows import Dimensions

# Values of the released models, which are transformers' defaults.
TOKENS: Mapping[str, int] = dict(zip(TOKEN_IDS, (248_056, 248_057, 248_053, 248_054), strict=True))
LINEAR, FULL = "linear_attention", "full_attention"
HEAD_DIM = 256
MTP_LAYERS = "mtp_num_hidden_layers"  # a field of text configurations
LINEAR_SIZES: Mapping[str, int] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

FULL_LAYERS = "text_config.layers with full attention (layer_types, full_attention_interval)"


# Field types, in addition to those of all families.
_REQUIRED: Fields = {"text_config": {"num_key_value_heads": POSITIVE}}
_OPTIONAL: Fields = {"text_config": {"full_attention_interval": POSITIVE, **dict.fromkeys(LINEAR_SIZES, POSITIVE)}}
_NULLABLE: Mapping[str, Kind] = {
    **dict.fromkeys(("intermediate_size", "shared_expert_intermediate_size"), POSITIVE),
    MTP_LAYERS: Kind(lambda value: type(value) is int and value in (0, 1), "0 or 1, layers of multi-token prediction"),
    "layer_types": Kind(
        lambda value: isinstance(value, list | tuple) and all(isinstance(name, str) for name in value),
        "a list of names",
    ),
    "mlp_only_layers": Kind(lambda value: isinstance(value, list | tuple), "a list"),
}
_MOE_FIELDS = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_ROPE: Mapping[str, Any] = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}


def check_settings(config: Any) -> None:
    """Check that a configuration of a hybrid model is well-formed and supported.

    Raises:
        ValueError: a field is missing, invalid or not supported; the message names it.
    """
    hf_config.check_field_types(config, _REQUIRED, _OPTIONAL, _NULLABLE)
    text = config["text_config"]
    types, layers = layer_types_of(text), text["num_hidden_layers"]
    if len(types) != layers or not {LINEAR, FULL}.issuperset(types):
        raise ValueError(
            f"text_config.layer_types is {shown(list(types))}, expected {layers} entries of {LINEAR!r} or {FULL!r}"
        )
    value_heads, key_heads = (
        text.get(name, LINEAR_SIZES[name]) for name in ("linear_num_value_heads", "linear_num_key_heads")
    )
    if value_heads % key_heads:
        raise ValueError(
            f"text_config.linear_num_value_heads is {value_heads}, expected a multiple of linear_num_key_heads "
            f"({key_heads})"
        )
    experts = experts_of(text)
    for name in _MOE_FIELDS if experts else ("intermediate_size",):
        if text.get(name) is None:
            raise ValueError(
                f"the configuration lacks the field text_config.{name}, expected a number: the model has {experts} "
                "experts"
            )
    if experts and text["num_experts_per_tok"] > experts:
        raise ValueError(
            f"text_config.num_experts_per_tok is {text['num_experts_per_tok']}, expected 1 to num_experts ({experts})"
        )
    deepstack = list(config["vision_config"].get("deepstack_visual_indexes") or ())
    own = {
        # Linear attention has no other activation in megatron-core and transformers, even if MLPs have one.
        "text_config.hidden_act": (text.get("hidden_act", "silu").replace("swish", "silu"), "silu"),
        "text_config.attn_output_gate": (text.get("attn_output_gate", True), True),
        # Either all layers have experts, or none.
        "text_config.mlp_only_layers": (list(text.get("mlp_only_layers") or ()), []),
        "text_config.mtp_use_dedicated_embeddings": (text.get("mtp_use_dedicated_embeddings") or False, False),
        "vision_config.deepstack_visual_indexes": (deepstack, []),
    }
    hf_config.check_supported_values(config, own)
    rope_parameters(text)


def layer_types_of(text: Mapping) -> tuple[str, ...]:
    """Return the attention type of each layer: `layer_types`, if the text configuration contains it.

    Otherwise, one in `full_attention_interval` layers has full attention, and the others have linear attention.
    """
    if text.get("layer_types") is not None:
        return tuple(text["layer_types"])
    interval = text.get("full_attention_interval", 4)
    return tuple(FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(text["num_hidden_layers"]))


def released_text_fields(layers: int, value_heads: int) -> dict[str, Any]:
    """Return the fields that all released hybrid models have in `text_config`, in the format of transformers 5.

    Args:
        layers: number of layers.
        value_heads: number of value heads of linear attention.
    """
    return {
        "vocab_size": 248_320,
        "layer_types": [FULL if layer % 4 == 3 else LINEAR for layer in range(layers)],
        "head_dim": HEAD_DIM,
        **LINEAR_SIZES,
        "linear_num_value_heads": value_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "eos_token_id": 248_044,
        MTP_LAYERS: 1,
    }


def rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a text configuration; see `rope_parameters_of`.

    Raises:
        ValueError: the settings are malformed or not supported, or `mrope_section` does not fit the rotated dimensions.
    """
    rope = hf_config.rope_parameters_of(text, _ROPE)
    rotated = int((text.get("head_dim") or HEAD_DIM) * rope["partial_rotary_factor"])
    hf_config.check_mrope_section(rope["mrope_section"], rotated)
    return rope


def add_dimensions(
    shared: Dimensions,
    linear: Mapping[str, int],
    *,
    is_linear: Sequence[bool | int],
    shared_ffn: int | None,
    mtp: int | None,
) -> Dimensions:
    """Return a copy of `shared` to which the dimensions of a hybrid model have been added.

    Args:
        shared: the dimensions that all families have.
        linear: values of the fields in `LINEAR_SIZES`.
        is_linear: for each layer, whether it has linear attention.
        shared_ffn: width of the shared expert; None or 0 without a shared expert.
        mtp: number of layers of multi-token prediction.
    """
    key_dim, value_dim = linear["linear_key_head_dim"], linear["linear_value_head_dim"]
    key, value = linear["linear_num_key_heads"] * key_dim, linear["linear_num_value_heads"] * value_dim
    sizes = {
        "gated_q": 2 * shared["q"],
        "shared_ffn": shared_ffn or 0,
        "l_key": key,
        "l_key_dim": key_dim,
        "l_value": value,
        "l_value_dim": value_dim,
        "l_value_heads": linear["linear_num_value_heads"],
        "l_qkv": 2 * key + value,
        "l_conv": linear["linear_conv_kernel_dim"],
        "mtp": int(bool(mtp)),
        "mtp_dense": int(bool(mtp) and not shared["experts"]),
        "mtp_experts": int(bool(mtp) and bool(shared["experts"])),
        "hidden_twice": 2 * shared["hidden"],
    }
    layers = {
        "linear_layers": tuple(layer for layer, flag in enumerate(is_linear) if flag),
        "full_layers": tuple(layer for layer, flag in enumerate(is_linear) if not flag),
    }
    return replace(shared, sizes={**shared.sizes, **sizes}, indices={**shared.indices, **layers})


def dimensions_of(config: Mapping[str, Any], family: str) -> Dimensions:
    """Return the dimensions that the weight table of a family uses. Raise KeyError for a field that is missing."""
    text, layers = config["text_config"], config["text_config"]["num_hidden_layers"]
    experts = experts_of(text)
    shared = hf_config.model_dimensions(
        family,
        config,
        ffn=0 if experts else text["intermediate_size"],
        head_dim=text.get("head_dim") or HEAD_DIM,
        moe_layers=tuple(range(layers)) if experts else (),
    )
    return add_dimensions(
        shared,
        {name: text.get(name, default) for name, default in LINEAR_SIZES.items()},
        is_linear=[kind == LINEAR for kind in layer_types_of(text)],
        shared_ffn=text["shared_expert_intermediate_size"] if experts else 0,
        mtp=text.get(MTP_LAYERS),
    )


# Fields that identify a model (see `hf_config`) and that other families lack or treat differently.
_IDENTITY: Mapping[str, Mapping[str, Any]] = {
    "": TOKENS,
    "text_config": {"num_key_value_heads": None, "head_dim": HEAD_DIM, **LINEAR_SIZES},
}


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` that identify the model, with defaults filled in."""
    text = config["text_config"]
    fields = hf_config.identity_of_config(config, _IDENTITY, rope_parameters(text))
    fields["text_config.head_dim"] = fields["text_config.head_dim"] or HEAD_DIM
    fields["text_config.num_experts"] = experts_of(text)
    names = _MOE_FIELDS if experts_of(text) else ("intermediate_size",)
    fields |= {f"text_config.{name}": text[name] for name in names}
    fields[FULL_LAYERS] = [layer for layer, kind in enumerate(layer_types_of(text)) if kind == FULL]
    return fields


def fields_of_run(model: Mapping[str, Any], config: Mapping[str, Any], dense: str) -> dict[str, Any]:
    """Return the fields that identify a model and that the `model` section of a run's `run_config.yaml` contains.

    Args:
        model: the `model` section.
        config: the result of `fields_of` for the configuration to compare with.
        dense: the `model_type` of models without experts.
    """
    fields = hf_config.identity_of_run(model, config, dense)
    fields |= renamed(model, {name: f"text_config.{name}" for name in LINEAR_SIZES})
    if model.get("num_moe_experts"):
        shared = "shared_expert_intermediate_size"
        fields |= renamed(model, {f"moe_{shared}": f"text_config.{shared}"})
    pattern, layers = model.get("linear_attention_freq"), model.get("num_layers")
    if isinstance(pattern, list):
        fields[FULL_LAYERS] = [layer for layer, is_linear in enumerate(pattern) if not is_linear]
    elif type(pattern) is int and type(layers) is int and pattern > 0:
        fields[FULL_LAYERS] = list(range(pattern - 1, layers, pattern))
    return fields
