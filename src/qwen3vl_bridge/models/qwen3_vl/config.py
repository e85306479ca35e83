"""Reading a Qwen3-VL `config.json`: checks, dimensions, and the fields that identify the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.config import hf_config
from qwen3vl_bridge.config.hf_config import DENSE_WIDTH, LAYERS, POSITIVE, TOKEN_IDS, Fields, Kind, experts_of, shown
from qwen3vl_bridge.weights.rows import Dimensions

FAMILY_NAME = "qwen3_vl"
# As in the released models, and transformers' defaults. Source: transformers, Qwen3VLConfig.
TOKENS: Mapping[str, int] = dict(zip(TOKEN_IDS, (151_655, 151_656, 151_652, 151_653), strict=True))

# Field types, in addition to those of all families.
_REQUIRED: Fields = {
    "text_config": {"intermediate_size": POSITIVE},
    "vision_config": {"deepstack_visual_indexes": LAYERS},
}
_OPTIONAL: Fields = {"text_config": {"decoder_sparse_step": POSITIVE}}
_NULLABLE: Mapping[str, Kind] = {"num_key_value_heads": POSITIVE, "mlp_only_layers": LAYERS}


def check_settings(config: Any) -> None:
    """Check that a configuration is well-formed and supported.

    Raises:
        ValueError: a field is missing, invalid or not supported; the message names it.
    """
    hf_config.check_field_types(config, _REQUIRED, _OPTIONAL, _NULLABLE)
    text = config["text_config"]
    if "num_key_value_heads" not in text:  # transformers' default fits no released model
        raise ValueError("the configuration lacks the field text_config.num_key_value_heads, expected a number or null")
    check_deepstack(config["vision_config"], text["num_hidden_layers"])
    hf_config.check_supported_values(config, {})
    hf_config.check_mrope_section(rope_parameters(text)["mrope_section"], head_dim_of(text))
    if experts := experts_of(text):
        topk = text.get("num_experts_per_tok")
        if not isinstance(topk, int) or not 0 < topk <= experts:
            raise ValueError(f"text_config.num_experts_per_tok is {topk!r}, expected 1 to num_experts ({experts})")
        if len({text[name] for name in ("num_experts", "num_local_experts") if text.get(name)}) > 1:
            raise ValueError(
                f"text_config.num_experts is {text['num_experts']}, but num_local_experts is "
                f"{text['num_local_experts']}: remove one of the two fields"
            )
        if not moe_layers_of(text):
            raise ValueError(
                f"text_config has {experts} experts, but no layer uses them: decoder_sparse_step is "
                f"{text.get('decoder_sparse_step', 1)} and mlp_only_layers is {text.get('mlp_only_layers')}. Correct "
                "these fields, or remove the fields for experts"
            )
        if text.get("moe_intermediate_size") is None:
            raise ValueError("text_config.moe_intermediate_size is missing, expected the width of an expert")
    hf_config.check_model_type(config, FAMILY_NAME, len(moe_layers_of(text)), "layers have experts")


def check_deepstack(vision: Mapping[str, Any], text_layers: int) -> None:
    """Raise ValueError unless `deepstack_visual_indexes` are ascending vision layers, at most `text_layers` of them."""
    indexes, depth = list(vision["deepstack_visual_indexes"]), vision["depth"]
    if indexes != sorted(set(indexes)) or (indexes and not 0 <= indexes[0] <= indexes[-1] < depth):
        raise ValueError(
            f"deepstack_visual_indexes is {shown(indexes)}, expected ascending indices of the {depth} vision layers"
        )
    if len(indexes) > text_layers:
        raise ValueError(
            f"deepstack_visual_indexes has {len(indexes)} layers, but there are only {text_layers} text layers "
            "(num_layers): each DeepStack layer needs a text layer"
        )


def moe_layers_of(text: Mapping) -> tuple[int, ...]:
    """Return the indices of layers with experts. Source: transformers, Qwen3VLMoeTextDecoderLayer."""
    if not experts_of(text):
        return ()
    step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers") or ()
    return tuple(i for i in range(text["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def head_dim_of(text: Mapping) -> int:
    """Return the head dimension of a text configuration."""
    # In transformers only the dense model has a default for files without the field.
    head_dim = text.get("head_dim", None if experts_of(text) else 128)
    return head_dim or text["hidden_size"] // text["num_attention_heads"]


def rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a text configuration, see `rope_parameters_of`.

    Raises:
        ValueError: the settings are malformed, not supported, or rotate only a part of each head.
    """
    defaults = {"rope_theta": None, "mrope_section": None, "partial_rotary_factor": 1.0}
    rope = hf_config.rope_parameters_of(text, defaults)
    if (factor := rope.pop("partial_rotary_factor")) != 1.0:
        raise ValueError(f"partial_rotary_factor is {factor}, expected 1.0: remove it, or set it to 1.0")
    return rope


def dimensions_of(config: Mapping) -> Dimensions:
    """Return the dimensions that the weight table uses, from a `config.json`. Raise KeyError for a missing field."""
    text = config["text_config"]
    return hf_config.model_dimensions(
        FAMILY_NAME, config, ffn=text["intermediate_size"], head_dim=head_dim_of(text), moe_layers=moe_layers_of(text)
    )


# Key of the list of layers with experts, among the fields that identify a model (see `hf_config`).
_MOE_LAYERS = "text_config.layers with experts (decoder_sparse_step, mlp_only_layers)"


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` that identify the model, with defaults filled in."""
    text, moe_layers = config["text_config"], list(moe_layers_of(config["text_config"]))
    fields = hf_config.identity_of_config(config, {"": TOKENS}, rope_parameters(text)) | {
        "vision_config.deepstack_visual_indexes": list(config["vision_config"]["deepstack_visual_indexes"]),
        "text_config.num_key_value_heads": text["num_key_value_heads"] or text["num_attention_heads"],
        "text_config.head_dim": head_dim_of(text),
        "text_config.num_experts": experts_of(text),
    }
    if len(moe_layers) < text["num_hidden_layers"]:  # otherwise no layer has this width
        fields["text_config.intermediate_size"] = text["intermediate_size"]
    if moe_layers:
        fields |= {f"text_config.{name}": text.get(name) for name in ("num_experts_per_tok", "moe_intermediate_size")}
        fields[_MOE_LAYERS] = moe_layers
    return fields


def fields_of_run(model: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that identify a model and that the `model` section of a run's `run_config.yaml` contains.

    `config` is the result of `fields_of` for the configuration to compare with.
    """
    fields = hf_config.identity_of_run(model, config, FAMILY_NAME)
    layers, frequency = model.get("num_layers"), model.get("moe_layer_freq", 1)
    moe_layers = None
    if model.get("num_moe_experts") and type(frequency) is int and type(layers) is int and frequency > 0:
        moe_layers = list(range(0, layers, frequency))
    elif model.get("num_moe_experts") and isinstance(frequency, list):
        moe_layers = [layer for layer, has_experts in enumerate(frequency) if has_experts]
    if moe_layers is not None:
        fields[_MOE_LAYERS] = moe_layers
        fields |= hf_config.renamed(model, DENSE_WIDTH) if len(moe_layers) != layers else {}
    return fields
