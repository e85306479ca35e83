"""Check the fields of a Hugging Face `config.json`, and return the fields that identify a model.

Uses only the standard library, because the converter and the planner read configurations without torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from qwen3vl_bridge.weights.rows import Dimensions, vision_sizes

TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
# Field of a provider -> field of a text configuration with the same meaning. EXPERT_FIELDS exist only with experts.
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
# Field of a provider -> name of the same setting in transformers' `rope_parameters`.
ROPE_FIELDS: Mapping[str, str] = {
    "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor",
    "mrope_section": "mrope_section",
}
_LONGEST = 10_000  # layers or experts; a malicious file must not be able to fill the memory with lists


class Kind(NamedTuple):
    """The allowed values of a field."""

    fits: Callable[[Any], bool]  # returns True for an allowed value
    expected: str  # describes the allowed values in error messages


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def one_of(names: Sequence[str]) -> Kind:
    """Return a `Kind` that allows only the values in `names`."""
    return Kind(lambda value: value in names, f"one of {', '.join(names)}")


POSITIVE = Kind(lambda value: _is_whole(value, 1), "a whole number of at least 1")
COUNT = Kind(lambda value: _is_whole(value, 1) and value <= _LONGEST, f"a whole number from 1 to {_LONGEST}")
EXPERTS = Kind(lambda value: _is_whole(value) and value <= _LONGEST, f"a whole number from 0 to {_LONGEST}")
TOKEN = Kind(_is_whole, "a token id")
LAYERS = Kind(lambda value: isinstance(value, list | tuple) and all(map(_is_whole, value)), "a list of layer indices")
ABOVE_ZERO = Kind(lambda value: _is_number(value) and value > 0, "a number above 0")
NOT_NEGATIVE = Kind(lambda value: _is_number(value) and value >= 0, "a number of 0 or more")
TRUTH = Kind(lambda value: isinstance(value, bool), "true or false")
TEXT = Kind(lambda value: isinstance(value, str), "a name")
OBJECT = Kind(lambda value: isinstance(value, Mapping), "an object")
SECTION = Kind(
    lambda value: isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_whole, value)),
    "three whole numbers",
)

# Allowed values of `hidden_act`. The text model supports the activations of `fields.text_activation`, the vision tower
# all activations of transformers that have no parameters.
TEXT_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")
VISION_ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh"),
    *("gelu_accurate", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6"),
    *("sigmoid", "silu", "sqrtsoftplus", "swish", "tanh"),
)

# Section of the file -> field -> allowed values. The section "" is the file itself.
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
        "hidden_act": one_of(TEXT_ACTIVATIONS),
        "max_position_embeddings": POSITIVE,
        **dict.fromkeys(("attention_dropout", "initializer_range", "router_aux_loss_coef"), NOT_NEGATIVE),
    },
    "vision_config": {
        **dict.fromkeys(("in_channels", "out_hidden_size"), POSITIVE),
        "hidden_act": one_of(VISION_ACTIVATIONS),
        "initializer_range": NOT_NEGATIVE,
    },
}
# Fields of the text model that may also be null.
_NULLABLE: Mapping[str, Kind] = {
    **dict.fromkeys(("head_dim", "moe_intermediate_size", "num_experts_per_tok"), POSITIVE),
    **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"), ABOVE_ZERO),
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
_ROPE_SECTION = "text_config.rope_parameters."  # prefix of the names of rotary settings that identify a model
_OUT_HIDDEN_SIZE = 3584  # default of transformers


def check_field_types(config: Any, required: Fields, optional: Fields, nullable: Mapping[str, Kind]) -> None:
    """Check the type of each field of a `config.json`, and the constraints between fields that all families share.

    Args:
        config: contents of the file.
        required, optional: additional fields of the family, by section.
        nullable: additional fields of the family's text model that may be missing or null.

    Raises:
        ValueError: a field is missing, has the wrong type, or contradicts another field; the message names the field.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"the configuration is {shown(config)}, expected an object")
    for section in _REQUIRED:
        fields = config[section] if section else config
        for name, kind in {**_REQUIRED[section], **required.get(section, {})}.items():
            if name not in fields:
                field = f"{section}.{name}" if section else name
                raise ValueError(f"the configuration lacks the field {field}, expected {kind.expected}")
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
    """Return the `repr` of a value for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def rope_parameters_of(text: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a text configuration in the format of transformers 5, converted from older formats.

    Args:
        text: the text configuration.
        defaults: the settings that every model of the family has: name -> default value, None for a required setting.

    Returns:
        The values of `rope_type` and of the settings in `defaults`, and the parameters of a scaled embedding.

    Raises:
        ValueError: the rotary embedding's type is not supported, or a value is missing or has the wrong type.
    """
    for section in ("rope_parameters", "rope_scaling"):
        for name, value in (text.get(section) or {}).items():
            if value is not None and name in _ROPE:
                _check_type(f"text_config.{section}", name, value, _ROPE[name])
    # As in transformers, `rope_scaling` replaces `rope_parameters`. vLLM's users add it to files that have the latter.
    given = {k: v for k, v in (text.get("rope_scaling") or text.get("rope_parameters") or {}).items() if v is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("mrope", *ROPE_TYPES):
        raise ValueError(f"rope_type is {kind!r}, expected one of {', '.join(ROPE_TYPES)}")
    if not given.pop("mrope_interleaved", True):
        raise ValueError("mrope_interleaved is False, expected True as in every released model")
    rope: dict[str, Any] = {"rope_type": "default" if kind == "mrope" else kind}
    inner, outer = given.get("partial_rotary_factor"), text.get("partial_rotary_factor")
    if None not in (inner, outer) and inner != outer:  # the rope type determines which one transformers uses
        raise ValueError(
            f"partial_rotary_factor is {inner} in the rotary embedding's parameters and {outer} in text_config: "
            "remove one of them"
        )
    for name, default in defaults.items():
        rope[name] = next((value for value in (given.get(name), text.get(name)) if value is not None), default)
    if rope["rope_type"] != "default":
        rope |= {name: value for name, value in given.items() if name not in (*rope, "type")}
        rope.setdefault("factor", None)
    if rope["rope_type"] in ("yarn", "llama3"):  # as in transformers, text_config's own field has priority
        name = "original_max_position_embeddings"
        rope[name] = text.get(name) or rope.get(name) or text.get("max_position_embeddings")
    for name, value in rope.items():
        if value is None:
            raise ValueError(f"{name} is missing: set it in text_config.rope_parameters or in text_config itself")
    return rope | {"mrope_section": list(rope["mrope_section"])}


def rope_provider_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a provider's rotary fields for `rope`, the rotary settings from `rope_parameters_of`."""
    fields = {field: rope[name] for field, name in ROPE_FIELDS.items() if name in rope}
    return fields | {"rope_parameters": None if rope["rope_type"] == "default" else dict(rope)}


def _rope_of_run(model: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings that identify a model, from the `model` section of a `run_config.yaml`.

    Args:
        found: the result of `identity_of_config` for the configuration to compare with. Settings of an unscaled
            embedding are returned only if `found` contains them.
    """
    names = {field: f"{_ROPE_SECTION}{name}" for field, name in ROPE_FIELDS.items() if _ROPE_SECTION + name in found}
    # Megatron-Bridge stores the parameters of a scaled embedding in `hf_text_config`, this package in its own field.
    text = model.get("hf_text_config")
    scaled = text.get("rope_scaling") or text.get("rope_parameters") if isinstance(text, Mapping) else None
    scaled = scaled or model.get("rope_parameters")
    scaled = scaled if isinstance(scaled, Mapping) else {}
    kind, fields = scaled.get("rope_type") or scaled.get("type"), {}
    if kind not in (None, "default", "mrope"):
        fields = {k: v for k, v in scaled.items() if k not in ("type", "mrope_interleaved") and v is not None}
    elif kind or "rope_parameters" in model or isinstance(text, Mapping):
        fields = {"rope_type": "default"}
    return renamed(model, names) | {_ROPE_SECTION + name: value for name, value in fields.items()}


def with_scaled_rope(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a `config.json` in which a provider's `rope_parameters` replace the rotary settings."""
    others = ("rope_scaling", "original_max_position_embeddings")  # transformers would prefer these fields
    text = {name: value for name, value in config["text_config"].items() if name not in others}
    return {**config, "text_config": {**text, "rope_parameters": {"mrope_interleaved": True, **rope}}}


def check_tower_size(vision: Mapping[str, Any], text_width: int) -> None:
    """Raise ValueError if the vision tower does not fit the hidden size `text_width` of the text model.

    The output size must equal `text_width`, and the number of position embeddings must be a square number.
    """
    width = vision.get("out_hidden_size", _OUT_HIDDEN_SIZE)
    if width != text_width:
        raise ValueError(
            f"vision_config.out_hidden_size is {width}, expected {text_width}, the text model's hidden_size"
        )
    positions = vision["num_position_embeddings"]
    if math.isqrt(positions) ** 2 != positions:
        raise ValueError(f"vision_config.num_position_embeddings is {positions}, expected the square of a whole number")


def check_mrope_section(section: Sequence[int], rotated: int) -> None:
    """Raise ValueError unless the sum of `section` is half of `rotated`, the number of rotated dimensions of a head."""
    if 2 * sum(section) != rotated:
        raise ValueError(
            f"mrope_section is {list(section)} with the sum {sum(section)}, expected half of the {rotated} dimensions "
            "of a head that are rotated"
        )


def check_model_type(config: Mapping[str, Any], dense: str, experts: int, what: str) -> None:
    """Raise ValueError if a model with experts has the `model_type` of dense models, or the reverse.

    Args:
        config: contents of the `config.json`.
        dense: the family's `model_type` for dense models. The type for models with experts is f"{dense}_moe".
        experts: number of experts, or number of layers with experts; 0 for a dense model.
        what: words that follow the number in the message: "experts" or "layers have experts".
    """
    kind = config.get("model_type")
    if kind in (dense, f"{dense}_moe") and bool(experts) != (kind != dense):
        raise ValueError(
            f"{experts} {what}, which model_type {kind} does not allow: set model_type to "
            f"{f'{dense}_moe' if experts else dense}, or correct the fields for experts"
        )


def experts_of(text: Mapping[str, Any]) -> int:
    """Return the number of experts of a MoE layer, from `num_experts` or `num_local_experts`; 0 in a dense model."""
    return text.get("num_experts", text.get("num_local_experts")) or 0


def model_dimensions(
    family: str, config: Mapping[str, Any], *, ffn: int, head_dim: int, moe_layers: Sequence[int] = ()
) -> Dimensions:
    """Return the dimensions that all families have, from a `config.json`. Raise KeyError for a missing field.

    Args:
        family: name of the family.
        config: contents of the file.
        ffn: width of a dense MLP.
        head_dim: dimension of an attention head of the text model.
        moe_layers: indices of the text layers with experts.
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
    """Raise ValueError for a value in a `config.json` that this package's models do not support.

    `own` contains additional fields of the family: field name -> (value found, only supported value).
    """
    text = config["text_config"]
    values = {
        # With attention_bias, transformers adds a bias to the output projection too. No released model has one.
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
    """Return the block size (rows, columns) of FP8 scales in a `quantization_config`; None for one scale per matrix.

    Raises:
        ValueError: the weights are not FP8 (e4m3) with dynamic scales of activations, or a field is invalid.
    """
    given = quantization if isinstance(quantization, Mapping) else {}
    for name, expected, default in (
        ("quant_method", "fp8", None), ("fmt", "e4m3", "e4m3"), ("activation_scheme", "dynamic", "dynamic"),
    ):  # fmt: skip
        if (value := given.get(name) or default) != expected:
            raise ValueError(
                f"quantization_config.{name} is {value!r}, expected {expected!r}: the only quantized weights "
                "that can be read are FP8 (e4m3, with a scale for each block in weight_scale_inv). Use the model's "
                "bfloat16 release, or dequantize it with the library that quantized it"
            )
    modules = given.get("modules_to_not_convert") or []
    if not isinstance(modules, list | tuple) or not all(isinstance(name, str) for name in modules):
        raise ValueError(f"quantization_config.modules_to_not_convert is {modules!r:.80}, expected a list of names")
    block = given.get("weight_block_size", (128, 128))
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(_is_whole(size, 1) for size in block):
        raise ValueError(f"quantization_config.weight_block_size is {block!r}, expected two whole numbers above 0")
    return block[0], block[1]


# The fields that identify a model determine which tensors exist or what the tensors mean. They are read from a
# `config.json`, and from the provider in a run's `run_config.yaml`. Fields that the latter lacks are not compared.

# Section -> field -> default in transformers; None for fields that every file contains.
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
# Last part of a function's name in a `run_config.yaml` -> its name in `hidden_act`. Other functions are unknown.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "relu": "relu", "gelu_tanh": "gelu_pytorch_tanh"}


def identity_of_config(
    config: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]], rope: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a `config.json` that identify a model, by names such as "text_config.hidden_size".

    Args:
        config: the configuration.
        own: additional fields of the family: section -> field -> default value.
        rope: the rotary settings, from `rope_parameters_of`.
    """
    fields: dict[str, Any] = {}
    for section, shared in _IDENTITY.items():
        values, prefix = (config[section], f"{section}.") if section else (config, "")
        wanted = {**shared, **own.get(section, {})}
        fields |= {prefix + name: values.get(name, default) for name, default in wanted.items()}
    if fields["text_config.hidden_act"] == "swish":  # another name of silu
        fields["text_config.hidden_act"] = "silu"
    return fields | {_ROPE_SECTION + name: value for name, value in rope.items()}


def identity_of_run(model: Mapping[str, Any], config: Mapping[str, Any], dense: str) -> dict[str, Any]:
    """Return the fields that identify a model and that the `model` section of a `run_config.yaml` contains.

    The vocabulary size is returned only if it is smaller than in `config`, because a larger size may include padding.

    Args:
        model: the `model` section.
        config: the result of `identity_of_config` for the configuration to compare with. Fields of the vision tower are
            returned only if it contains them.
        dense: the `model_type` of the family's models without experts.
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
    return fields | _rope_of_run(model, config)


def renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that are listed in `names` (old name -> new name) and not None, under their new names."""
    return {other: fields[name] for name, other in names.items() if fields.get(name) is not None}
