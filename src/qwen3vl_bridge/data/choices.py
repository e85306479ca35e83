"""Settings with a fixed set of values."""

from __future__ import annotations

from typing import Any, get_args


def check_choice(name: str, found: object, kind: Any) -> None:
    """Refuse a value that is not in the set.

    Args:
        name: name of the setting.
        found: its value.
        kind: a `Literal` of the allowed values.

    Raises:
        ValueError: the value is not allowed.
    """
    allowed = get_args(kind)
    if found not in allowed:
        raise ValueError(f"{name} is {found!r}, expected {' or '.join(map(repr, allowed))}")
