"""Types of values that a field of a Hugging Face configuration may have, and their check.

What lives here: the types. What may not: names of fields (`fields.py`, `models/*/config_fields.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Longer lists are described by a count.
_MOST = 10_000
_LARGEST = sys.float_info.max


class Kind(NamedTuple):
    """Allowed values of a field, with their description for messages."""

    fits: Callable[[Any], bool]
    expected: str


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


POSITIVE = Kind(lambda value: _is_whole(value, 1), "a whole number of at least 1")
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


def check_value(section: str, name: str, value: Any, kind: Kind) -> None:
    """Check one field; raises ValueError if it has the wrong type."""
    if not kind.fits(value):
        raise ValueError(f"{named(section, name)} is {shown(value)}, expected {kind.expected}")


def named(section: str, name: str) -> str:
    """Name of a field for messages."""
    return f"{section}.{name}" if section else name


def shown(value: Any) -> str:
    """A value as text for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
