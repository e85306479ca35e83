"""Reading a Hugging Face `config.json` in all families: field types, unsupported values, what identifies a model.

Standard library only: the converter and the planner read configurations without torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from qwen3vl_bridge.weights.rows import Dimensions, vision_sizes

TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
# A provider's fields, and the fields of a text configuration with the same value; and those of experts.
TEXT_FIELDS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
}
EXPERT_FIELDS: Mapping[str, str] = {
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
_LONGEST = 10_000  # layers or experts: a hostile file must not make us build longer lists


class Kind(NamedTuple):
    """Allowed values of a field, with their description for messages."""

    fits: Callable[[Any], bool]
    expected: str


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


POSITIVE = Kind(lambda value: _is_whole(value, 1), "a whole number of at least 1")
COUNT = Kind(lambda value: _is_whole(value, 1) and value <= _LONGEST, f"a whole number from 1 to {_LONGEST}")
EXPERTS = Kind(lambda value: _is_whole(value) and value <= _LONGEST, f"a whole number up to {_LONGEST}")
TOKEN = Kind(_is_whole, "the number of a token")
LAYERS = Kind(lambda value: isinstance(value, list | tuple) and all(map(_is_whole, value)), "a list of layers")
ABOVE_ZERO = Kind(lambda value: _is_number(value) and value > 0, "a number above 0")
NOT_NEGATIVE = Kind(lambda value: _is_number(value) and value >= 0, "a number from 0 on")
TRUTH = Kind(lambda value: isinstance(value, bool), "true or false")
TEXT = Kind(lambda value: isinstance(value, str), "a name")
OBJECT = Kind(lambda value: isinstance(value, Mapping), "an object")
SECTION = Kind(
    lambda value: isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_whole, value)),
    "three whole numbers",
)

# Field types by section of the file; the section "" is the file itself.
Fields = Mapping[str, Mapping[str, Kind]]

_REQUIRED: Fields = {
    "": {"text_config": OBJECT, "vision_config": OBJECT},
    "text_config": {
        **dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads"), POSITIVE),
        "num_hidden_layers": COUNT,
    },
    "vision_config": {
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_heads", "patch_size"), POSITIVE),
        **dict.fromkeys(("temporal_patch_size", "spatial_merge_size", "num_position_embeddings"), POSITIVE),
        "depth": COUNT,
    },
}
_OPTIONAL: Fields = {
    "": {"tie_word_embeddings": TRUTH, **dict.fromkeys(TOKEN_IDS, TOKEN)},
    "text_config": {
        "rms_norm_eps": ABOVE_ZERO,
        "hidden_act": TEXT,
        "max_position_embeddings": POSITIVE,
        **dict.fromkeys(("attention_dropout", "initializer_range", "router_aux_loss_coef"), NOT_NEGATIVE),
    },
    "vision_config": {
        **dict.fromkeys(("in_channels", "out_hidden_size"), POSITIVE),
        "hidden_act": TEXT,
        "initializer_range": NOT_NEGATIVE,
    },
}
# Fields of the text model that may also be null.
_NULLABLE: Mapping[str, Kind] = {
    **dict.fromkeys(("head_dim", "moe_intermediate_size", "num_experts_per_tok"), POSITIVE),
    **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
    "rope_theta": ABOVE_ZERO,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT),
}
_ROPE: Mapping[str, Kind] = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "mrope_section": SECTION,
    "mrope_interleaved": TRUTH,
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"), ABOVE_ZERO),
    **dict.fromkeys(("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), ABOVE_ZERO),
    **dict.fromkeys(("partial_rotary_factor", "mscale", "mscale_all_dim"), NOT_NEGATIVE),
    "truncate": TRUTH,
}
# Rotary embeddings whose frequencies do not depend on a batch's length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_OUT_HIDDEN_SIZE = 3584  # default of transformers


def check_field_types(config: Any, required: Fields, optional: Fields, nullable: Mapping[str, Kind]) -> None:
    """Check the fields of a configuration, each by itself, and the constraints that all families have in common.

    `required`, `optional` and `nullable` (fields of the text model that may also be null) are a family's own.

    Raises:
        ValueError: a field is missing, has the wrong type, or is inconsistent with another one; the message names it.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"the configuration is {shown(config)}, expected an object")
    for section in _REQUIRED:
        fields = config[section] if section else config
        for name, kind in {**_REQUIRED[section], **required.get(section, {})}.items():
            if name not in fields:
                field = f"{section}.{name}" if section else name
                raise ValueError(f"lacks the field {field}, expected {kind.expected}")
            _check_type(section, name, fields[name], kind)
        for name, kind in {**_OPTIONAL[section], **optional.get(section, {})}.items():
            if name in fields:
                _check_type(section, name, fields[name], kind)
    text, vision = config["text_config"], config["vision_config"]
    for name, kind in {**_NULLABLE, **nullable}.items():
        if text.get(name) is not None:
            _check_type("text_config", name, text[name], kind)
    heads = text["num_attention_heads"]
    for name, whole, part, divisor in (
        ("text_config.num_attention_heads", heads, "num_key_value_heads", text.get("num_key_value_heads") or heads),
        ("vision_config.hidden_size", vision["hidden_size"], "num_heads", vision["num_heads"]),
    ):
        if whole % divisor:
            raise ValueError(f"{name} is {whole}, expected a multiple of {part}, which is {divisor}")
    check_tower_size(vision, text["hidden_size"])


def _check_type(section: str, name: str, value: Any, kind: Kind) -> None:
    if not kind.fits(value):
        raise ValueError(f"{f'{section}.{name}' if section else name} is {shown(value)}, expected {kind.expected}")


def shown(value: Any) -> str:
    """A value as text for messages, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def rope_parameters_of(text: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A text configuration's rotary settings, of either format, in the format of transformers 5.

    Args:
        text: the text configuration.
        defaults: a family's names and defaults for what every model has; None where a configuration has to have it.

    Returns:
        `rope_type`, what is in `defaults`, and the parameters of a scaled type.

    Raises:
        ValueError: a type that is not supported, or a value that is missing or of the wrong type.
    """
    for section in ("rope_parameters", "rope_scaling"):
        for name, value in (text.get(section) or {}).items():
            if value is not None and name in _ROPE:
                _check_type(f"text_config.{section}", name, value, _ROPE[name])
    given = {k: v for k, v in (text.get("rope_parameters") or text.get("rope_scaling") or {}).items() if v is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("mrope", *ROPE_TYPES):
        raise ValueError(f"rope_type is {kind!r}, expected one of {', '.join(ROPE_TYPES)}")
    if not given.pop("mrope_interleaved", True):
        raise ValueError("mrope_interleaved is False, expected True as in every released model")
    rope: dict[str, Any] = {"rope_type": "default" if kind == "mrope" else kind}
    for name, default in defaults.items():
        rope[name] = next((value for value in (given.get(name), text.get(name)) if value is not None), default)
    if rope["rope_type"] != "default":
        rope |= {name: value for name, value in given.items() if name not in (*rope, "type")}
        rope.setdefault("factor", None)
    if rope["rope_type"] in ("yarn", "llama3"):  # as transformers does
        rope.setdefault("original_max_position_embeddings", text.get("max_position_embeddings"))
    for name, value in rope.items():
        if value is None:
            raise ValueError(f"text_config has no {name}, neither in rope_parameters nor in text_config itself")
    return rope | {"mrope_section": list(rope["mrope_section"])}


def scaled_rope_of_run(model: Mapping[str, Any]) -> dict[str, Any]:
    """The identifying fields of a run's rotary embedding beside those that a family names itself.

    Megatron-Bridge stores a scaled one in the text configuration, we in a field.
    """
    text = model.get("hf_text_config")
    scaled = text.get("rope_parameters") or text.get("rope_scaling") if isinstance(text, Mapping) else None
    scaled = scaled or model.get("rope_parameters")
    scaled = scaled if isinstance(scaled, Mapping) else {}
    kind, fields = scaled.get("rope_type") or scaled.get("type"), {}
    if kind not in (None, "default", "mrope"):
        fields = {k: v for k, v in scaled.items() if k not in ("type", "mrope_interleaved") and v is not None}
    elif kind or "rope_parameters" in model or isinstance(text, Mapping):
        fields = {"rope_type": "default"}
    return {f"text_config.rope_parameters.{name}": value for name, value in fields.items()}


def with_scaled_rope(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with a provider's `rope_parameters`, in place of all that it had of another type."""
    text = {name: value for name, value in config["text_config"].items() if name != "rope_scaling"}
    return {**config, "text_config": {**text, "rope_parameters": {"mrope_interleaved": True, **rope}}}


def check_tower_size(vision: Mapping[str, Any], text_width: int) -> None:
    """Check that a vision tower's output suits a text model of this hidden size; raises ValueError."""
    width = vision.get("out_hidden_size", _OUT_HIDDEN_SIZE)
    if width != text_width:
        raise ValueError(f"vision_config.out_hidden_size is {width}, expected hidden_size {text_width}")
    positions = vision["num_position_embeddings"]
    if math.isqrt(positions) ** 2 != positions:
        raise ValueError(f"vision_config.num_position_embeddings is {positions}, expected the square of a whole number")


def check_mrope_section(section: Sequence[int], rotated: int) -> None:
    """Check that the sections are half of a head's rotated dimensions; raises ValueError."""
    if 2 * sum(section) != rotated:
        raise ValueError(
            f"mrope_section is {list(section)} with the sum {sum(section)}, expected half of the {rotated} dimensions "
            "of a head that are rotated"
        )


def check_model_type(config: Mapping[str, Any], dense: str, experts: int, what: str) -> None:
    """Check that a model has experts if its `model_type` says so; `dense` is that of the family's other models."""
    kind = config.get("model_type")
    if kind in (dense, f"{dense}_moe") and bool(experts) != (kind != dense):
        raise ValueError(f"{experts} {what}, which model_type {kind} does not allow")


def experts_of(text: Mapping[str, Any]) -> int:
    """Experts of a MoE layer, in the format of the released files or of transformers 5; 0 in a dense model."""
    return text.get("num_experts", text.get("num_local_experts")) or 0


def model_dimensions(
    family: str, config: Mapping[str, Any], *, ffn: int, head_dim: int, moe_layers: Sequence[int] = ()
) -> Dimensions:
    """Dimensions that all families have, of a `config.json`; raises KeyError for a missing field.

    `deepstack_visual_indexes` of the tower have a DeepStack merger, `moe_layers` of the text model have experts.
    """
    text, vision = config["text_config"], config["vision_config"]
    layers, heads, experts = text["num_hidden_layers"], text["num_attention_heads"], experts_of(text)
    kv_heads = text["num_key_value_heads"] or heads
    moe_ffn = (text["moe_intermediate_size"] or 0) if moe_layers else 0
    deepstack_layers = tuple(vision.get("deepstack_visual_indexes") or ())
    sizes = {
        "vocab": text["vocab_size"], "hidden": text["hidden_size"], "ffn": ffn,
        "untied": int(not config.get("tie_word_embeddings", False)),
        "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "q": heads * head_dim, "kv": kv_heads * head_dim,
        "experts": experts, "topk": text["num_experts_per_tok"] if moe_layers else 0,
        "moe_ffn": moe_ffn, "moe_gate_up": 2 * moe_ffn,
        **vision_sizes(vision),
    }  # fmt: skip
    indices = {
        "text_layers": range(layers),
        "dense_layers": tuple(i for i in range(layers) if i not in moe_layers),
        "moe_layers": moe_layers,
        "experts": range(experts),
        "vision_layers": range(vision["depth"]),
        "deepstack_layers": deepstack_layers,
        "deepstack_mergers": range(len(deepstack_layers)),
    }
    return Dimensions(sizes, indices, family)


def check_supported_values(config: Mapping[str, Any], own: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse values that no family's model supports, or that this family's does not.

    `own` has, by name, the value of a further field of the family and the only one that is supported.

    Raises:
        ValueError: a setting that would otherwise be ignored; the message names it.
    """
    text = config["text_config"]
    values = {
        # transformers gives the output projection a bias too, which no released model has.
        "text_config.attention_bias": (text.get("attention_bias") or False, False),
        "text_config.use_sliding_window": (text.get("use_sliding_window") or False, False),
        # transformers divides the weights of the top-k experts by their sum whatever this setting is.
        "text_config.norm_topk_prob": (text.get("norm_topk_prob", True), True),
        **own,
    }
    for name, (value, expected) in values.items():
        if value != expected:
            raise ValueError(f"{name} is {value!r}, expected {expected!r}: this model implements nothing else")
    if config.get("quantization_config") is not None:
        fp8_block(config["quantization_config"])


def fp8_block(quantization: Any) -> tuple[int, int] | None:
    """Rows and columns with one scale in weights that a `quantization_config` describes; None: all of a matrix.

    Raises:
        ValueError: weights in another form than FP8 (e4m3) with scales that depend on nothing but the weights.
    """
    given = quantization if isinstance(quantization, Mapping) else {}
    for name, expected, default in (
        ("quant_method", "fp8", None), ("fmt", "e4m3", "e4m3"), ("activation_scheme", "dynamic", "dynamic"),
    ):  # fmt: skip
        if (value := given.get(name) or default) != expected:
            raise ValueError(
                f"quantization_config.{name} is {value!r}, expected {expected!r}: of quantized weights only those in "
                "FP8 (e4m3, with a scale for each block as weight_scale_inv) can be read; use the model's bfloat16 "
                "release, or dequantize it with the library that made it"
            )
    block = given.get("weight_block_size", (128, 128))
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(_is_whole(size, 1) for size in block):
        raise ValueError(f"quantization_config.weight_block_size is {block!r}, expected two whole numbers above 0")
    return block[0], block[1]


# What identifies a model: the fields that determine which tensors exist or what they mean. They are read from a
# `config.json`, and from the provider in a run's `run_config.yaml`, which may lack any of them: those are not compared.

# By section, with transformers' defaults; a field without a default is in every file.
_IDENTITY: Mapping[str, Mapping[str, Any]] = {
    "": {"model_type": None, "tie_word_embeddings": False},
    "text_config": {
        **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    },
    "vision_config": {
        **dict.fromkeys(("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size")),
        **dict.fromkeys(("temporal_patch_size", "spatial_merge_size", "num_position_embeddings")),
        "out_hidden_size": _OUT_HIDDEN_SIZE,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
DENSE_WIDTH: Mapping[str, str] = {"ffn_hidden_size": "text_config.intermediate_size"}
# Functions by the last part of their name in a `run_config.yaml`. Other functions are unknown.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "relu": "relu", "gelu_tanh": "gelu_pytorch_tanh"}


def identity_of_config(config: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The identifying fields of a `config.json` that every family has, and a family's own, by names "section.field".

    `own` are further fields with one spelling in all files, by section, with their defaults.
    """
    fields: dict[str, Any] = {}
    for section, shared in _IDENTITY.items():
        values, prefix = (config[section], f"{section}.") if section else (config, "")
        wanted = {**shared, **own.get(section, {})}
        fields |= {prefix + name: values.get(name, default) for name, default in wanted.items()}
    if fields["text_config.hidden_act"] == "swish":  # another name for it
        fields["text_config.hidden_act"] = "silu"
    return fields


def identity_of_run(model: Mapping[str, Any], config: Mapping[str, Any], dense: str) -> dict[str, Any]:
    """The identifying fields in the `model` section of a run's file that every family has, as far as they are given.

    A vocabulary larger than the configuration's is left out: its padding is known from the tensors' rows. Of the tower
    only fields are used that the configuration's identity has. `dense` is the `model_type` of models without experts.
    """
    fields = renamed(model, dict(zip(TOKEN_IDS, TOKEN_IDS, strict=True)))
    fields |= renamed(model, {"share_embeddings_and_output_weights": "tie_word_embeddings"})
    fields |= renamed(model, {name: f"text_config.{of_text}" for name, of_text in TEXT_FIELDS.items()})
    if "num_moe_experts" in model:
        experts = model["num_moe_experts"] or 0
        fields |= {"model_type": f"{dense}_moe" if experts else dense, "text_config.num_experts": experts}
        of_experts = {name: f"text_config.{of_text}" for name, of_text in EXPERT_FIELDS.items()}
        fields |= renamed(model, of_experts if experts else DENSE_WIDTH)
    if isinstance(activation := model.get("activation_func"), Mapping):
        name = _ACTIVATIONS.get(str(activation.get("_target_")).rpartition(".")[2])
        fields |= {} if name is None else {"text_config.hidden_act": name}
    if isinstance(vision := model.get("vision_config"), Mapping):
        fields |= {
            name: vision[field]
            for name in config
            if name.startswith("vision_config.") and (field := name.removeprefix("vision_config.")) in vision
        }
    vocab = model.get("vocab_size")
    if type(vocab) is int and vocab < config["text_config.vocab_size"]:
        fields["text_config.vocab_size"] = vocab
    return fields


def renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The fields that exist, under other names; null counts as missing."""
    return {other: fields[name] for name, other in names.items() if fields.get(name) is not None}
