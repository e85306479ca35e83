"""Settings that are one of a few words.

What lives here: the check of such a word. What may not: the words (each beside what they decide).
"""

from __future__ import annotations

from typing import Any, get_args


def check_choice(name: str, found: object, kind: Any) -> None:
    """Refuses a word that means nothing.

    Args:
        name: what the setting is called.
        found: its value.
        kind: the `Literal` of what it may be.

    Raises:
        ValueError: it is none of them.
    """
    allowed = get_args(kind)
    if found not in allowed:
        raise ValueError(f"{name} is {found!r}, expected {' or '.join(map(repr, allowed))}")
