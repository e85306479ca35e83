"""JSON as checkpoints use it: one object per file, no key twice.

What lives here: reading it with errors that name the file. What may not: what the objects mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.paths import read_whole

# More than any index has, and than any configuration goes deep.
_MAX_BYTES, _MAX_DEPTH = 1 << 28, 50


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice!r} occurs twice")
    return names


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """One JSON object.

    Args:
        text: the JSON.
        what: its name, for the error.

    Raises:
        CheckpointError: it is not JSON, not an object, or an object in it has a key twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is a JSON {type(value).__name__}, expected an object")
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise CheckpointError(f"{what} has objects in each other more than {_MAX_DEPTH} deep")
    return value


def _inside(value: Any) -> Iterable[Any]:
    """The objects and lists that an object or a list holds."""
    inner = value.values() if isinstance(value, dict) else value
    return [entry for entry in inner if isinstance(entry, (dict, list))]


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        CheckpointError: it is missing, unreadable, or something else.
    """
    try:
        text = read_whole(path, _MAX_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return parse_object(text, str(path))


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Write one JSON object to a file, in the style of transformers."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, such as of a file name that is not UTF-8
        data = (json.dumps(value, indent=2) + "\n").encode()
    path.write_bytes(data)
