"""Kinds of value that a field of a Hugging Face configuration may have, and the check of one.

What lives here: the kinds, and checks that every family makes. Standard library only. What may not: names of a
family's fields (`models/*/config_fields.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# What is counted out one by one.
_MOST = 10_000
_LARGEST = sys.float_info.max


class Kind(NamedTuple):
    """Values that a field may have, and the same in words."""

    fits: Callable[[Any], bool]
    expected: str


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


POSITIVE = Kind(lambda value: _is_whole(value, 1), "a whole number from 1 on")
COUNT = Kind(lambda value: _is_whole(value, 1) and value <= _MOST, f"a whole number from 1 to {_MOST}")
EXPERTS = Kind(lambda value: _is_whole(value) and value <= _MOST, f"a whole number up to {_MOST}")
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

_ROPE: Mapping[str, Kind] = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "mrope_section": SECTION,
    "mrope_interleaved": TRUTH,
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"), ABOVE_ZERO),
    **dict.fromkeys(("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), ABOVE_ZERO),
    **dict.fromkeys(("partial_rotary_factor", "mscale", "mscale_all_dim"), NOT_NEGATIVE),
    "truncate": TRUTH,
}
# transformers' own, where a file leaves it out.
_OUT_HIDDEN_SIZE = 3584


Fields = Mapping[str, Mapping[str, Kind]]


def check_sections(config: Any, required: Fields, optional: Fields, nullable: Mapping[str, Kind]) -> None:
    """Check the fields of a configuration, each by itself.

    Args:
        config: a `config.json`.
        required: fields that must be there, by section; the section "" is the file.
        optional: those that may be left out.
        nullable: those of the text configuration that may also be null.

    Raises:
        ValueError: a field is missing or of another kind; the message names it.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"the configuration is {shown(config)}, expected an object")
    for section in required:
        fields = config[section] if section else config
        for name, kind in required[section].items():
            if name not in fields:
                raise ValueError(f"lacks the field {named(section, name)}, expected {kind.expected}")
            check_value(section, name, fields[name], kind)
        for name, kind in optional[section].items():
            if name in fields:
                check_value(section, name, fields[name], kind)
    for name, kind in nullable.items():
        if config["text_config"].get(name) is not None:
            check_value("text_config", name, config["text_config"][name], kind)


def check_rope_fields(text: Mapping[str, Any]) -> None:
    """Check the rotary settings of a text configuration, in either spelling.

    Raises:
        ValueError: one is of another kind than it should be; the message names it.
    """
    for section in ("rope_parameters", "rope_scaling"):
        for name, value in (text.get(section) or {}).items():
            if value is not None and name in _ROPE:
                check_value(f"text_config.{section}", name, value, _ROPE[name])


def check_tower_size(vision: Mapping[str, Any], text_width: int) -> None:
    """Check that a vision tower is one whose tokens a text model can take; ValueError where it is not.

    Args:
        vision: its configuration, each field by itself as it should be.
        text_width: hidden size of the text model.
    """
    found = vision.get("out_hidden_size", _OUT_HIDDEN_SIZE)
    if found != text_width:
        raise ValueError(f"vision_config.out_hidden_size is {found}, expected hidden_size {text_width}")
    positions = vision["num_position_embeddings"]
    if math.isqrt(positions) ** 2 != positions:
        raise ValueError(f"vision_config.num_position_embeddings is {positions}, expected the square of a whole number")


def check_heads(text: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    """Check that heads share widths and groups evenly; ValueError where they do not."""
    heads = text["num_attention_heads"]
    for name, whole, part, divisor in (
        ("text_config.num_attention_heads", heads, "num_key_value_heads", text.get("num_key_value_heads") or heads),
        ("vision_config.hidden_size", vision["hidden_size"], "num_heads", vision["num_heads"]),
    ):
        if whole % divisor:
            raise ValueError(f"{name} is {whole}, expected a multiple of {part}, which is {divisor}")


def check_value(section: str, name: str, value: Any, kind: Kind) -> None:
    """Check one field; ValueError where it is of another kind."""
    if not kind.fits(value):
        raise ValueError(f"{named(section, name)} is {shown(value)}, expected {kind.expected}")


def named(section: str, name: str) -> str:
    """A field as messages name it."""
    return f"{section}.{name}" if section else name


def shown(value: Any) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
