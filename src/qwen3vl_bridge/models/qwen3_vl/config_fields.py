"""Fields of a Hugging Face configuration: which kind of value each has, and which values go together.

What lives here: the check, with the names that `config.json` has. Standard library only. What may not: well-formed
settings that this model does not compute (`config_checks.py`), what follows from the values (`config_dimensions.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# What is counted out one by one.
_MOST = 10_000
_LARGEST = sys.float_info.max


class _Kind(NamedTuple):
    """Values that a field may have, and the same in words."""

    fits: Callable[[Any], bool]
    expected: str


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


_POSITIVE = _Kind(lambda value: _is_whole(value, 1), "a whole number from 1 on")
_COUNT = _Kind(lambda value: _is_whole(value, 1) and value <= _MOST, f"a whole number from 1 to {_MOST}")
_EXPERTS = _Kind(lambda value: _is_whole(value) and value <= _MOST, f"a whole number up to {_MOST}")
_TOKEN = _Kind(_is_whole, "the number of a token")
_LAYERS = _Kind(lambda value: isinstance(value, list | tuple) and all(map(_is_whole, value)), "a list of layers")
_ABOVE_ZERO = _Kind(lambda value: _is_number(value) and value > 0, "a number above 0")
_NOT_NEGATIVE = _Kind(lambda value: _is_number(value) and value >= 0, "a number from 0 on")
_TRUTH = _Kind(lambda value: isinstance(value, bool), "true or false")
_TEXT = _Kind(lambda value: isinstance(value, str), "a name")
_OBJECT = _Kind(lambda value: isinstance(value, Mapping), "an object")
_SECTION = _Kind(
    lambda value: isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_whole, value)),
    "three whole numbers",
)

# Fields that must be there, those that may be left out, and those that may also be null.
_REQUIRED: Mapping[str, Mapping[str, _Kind]] = {
    "": {"text_config": _OBJECT, "vision_config": _OBJECT},
    "text_config": {
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"), _POSITIVE),
        "num_hidden_layers": _COUNT,
    },
    "vision_config": {
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_heads", "patch_size"), _POSITIVE),
        **dict.fromkeys(("temporal_patch_size", "spatial_merge_size", "num_position_embeddings"), _POSITIVE),
        "depth": _COUNT,
        "deepstack_visual_indexes": _LAYERS,
    },
}
_OPTIONAL: Mapping[str, Mapping[str, _Kind]] = {
    "": {
        "tie_word_embeddings": _TRUTH,
        **dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), _TOKEN),
    },
    "text_config": {
        "rms_norm_eps": _ABOVE_ZERO,
        "hidden_act": _TEXT,
        "max_position_embeddings": _POSITIVE,
        "decoder_sparse_step": _POSITIVE,
        **dict.fromkeys(("attention_dropout", "initializer_range", "router_aux_loss_coef"), _NOT_NEGATIVE),
    },
    "vision_config": {
        **dict.fromkeys(("in_channels", "out_hidden_size"), _POSITIVE),
        "hidden_act": _TEXT,
        "initializer_range": _NOT_NEGATIVE,
    },
}
_NULLABLE: Mapping[str, _Kind] = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts_per_tok"), _POSITIVE),
    **dict.fromkeys(("num_experts", "num_local_experts"), _EXPERTS),
    "mlp_only_layers": _LAYERS,
    "rope_theta": _ABOVE_ZERO,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT),
}
_ROPE: Mapping[str, _Kind] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "mrope_section": _SECTION,
    "mrope_interleaved": _TRUTH,
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"), _ABOVE_ZERO),
    **dict.fromkeys(("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), _ABOVE_ZERO),
    **dict.fromkeys(("partial_rotary_factor", "mscale", "mscale_all_dim"), _NOT_NEGATIVE),
    "truncate": _TRUTH,
}
# transformers' own, where a file leaves it out.
_OUT_HIDDEN_SIZE = 3584


def check_fields(config: Any) -> None:
    """Check every field that decides which tensors there are, or what they mean.

    Args:
        config: a Qwen3-VL `config.json`.

    Raises:
        ValueError: a field is missing, of another kind, or does not go with another one; the message names it.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"the configuration is {_shown(config)}, expected an object")
    for section in _REQUIRED:
        fields = config[section] if section else config
        for name, kind in _REQUIRED[section].items():
            if name not in fields:
                raise ValueError(f"lacks the field {_name(section, name)}, expected {kind.expected}")
            _check(section, name, fields[name], kind)
        for name, kind in _OPTIONAL[section].items():
            if name in fields:
                _check(section, name, fields[name], kind)
    text = config["text_config"]
    if "num_key_value_heads" not in text:  # transformers has a number for it that fits nobody
        raise ValueError("lacks the field text_config.num_key_value_heads, expected a number or null")
    for name, kind in _NULLABLE.items():
        if text.get(name) is not None:
            _check("text_config", name, text[name], kind)
    check_rope_fields(text)
    _check_heads(text, config["vision_config"])
    check_tower(config["vision_config"], text["hidden_size"], text["num_hidden_layers"])


def check_rope_fields(text: Mapping[str, Any]) -> None:
    """Check the rotary settings of a text configuration, in either spelling.

    Raises:
        ValueError: one is of another kind than it should be; the message names it.
    """
    for section in ("rope_parameters", "rope_scaling"):
        for name, value in (text.get(section) or {}).items():
            if value is not None and name in _ROPE:
                _check(f"text_config.{section}", name, value, _ROPE[name])


def check_tower(vision: Mapping[str, Any], text_width: int, text_layers: int) -> None:
    """Check that a vision tower is one that a text model can take features of.

    Args:
        vision: its configuration, each field by itself as it should be.
        text_width: hidden size of the text model.
        text_layers: its layers.

    Raises:
        ValueError: widths, positions or DeepStack taps that do not fit.
    """
    found = vision.get("out_hidden_size", _OUT_HIDDEN_SIZE)
    if found != text_width:
        raise ValueError(f"vision_config.out_hidden_size is {found}, expected hidden_size {text_width}")
    taps, layers = list(vision["deepstack_visual_indexes"]), vision["depth"]
    if taps != sorted(set(taps)) or (taps and not 0 <= taps[0] <= taps[-1] < layers):
        raise ValueError(f"deepstack_visual_indexes is {_shown(taps)}, expected ascending layers below {layers}")
    if len(taps) > text_layers:
        raise ValueError(f"{len(taps)} DeepStack taps need as many text layers, num_layers is {text_layers}")
    positions = vision["num_position_embeddings"]
    if math.isqrt(positions) ** 2 != positions:
        raise ValueError(f"vision_config.num_position_embeddings is {positions}, expected the square of a whole number")


def _check_heads(text: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    heads = text["num_attention_heads"]
    for name, whole, part, divisor in (
        ("text_config.num_attention_heads", heads, "num_key_value_heads", text.get("num_key_value_heads") or heads),
        ("vision_config.hidden_size", vision["hidden_size"], "num_heads", vision["num_heads"]),
    ):
        if whole % divisor:
            raise ValueError(f"{name} is {whole}, expected a multiple of {part}, which is {divisor}")


def _check(section: str, name: str, value: Any, kind: _Kind) -> None:
    if not kind.fits(value):
        raise ValueError(f"{_name(section, name)} is {_shown(value)}, expected {kind.expected}")


def _name(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
