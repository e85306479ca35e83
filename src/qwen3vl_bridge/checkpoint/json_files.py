"""JSON as checkpoints use it: one object per file.

What lives here: reading it with errors that name the file, and writing. What may not: parsing (`parsing.py`), what the
objects mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen3vl_bridge import parsing
from qwen3vl_bridge.checkpoint.errors import CheckpointError


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """One JSON object.

    Args:
        text: the JSON.
        what: its name, for the error.

    Raises:
        CheckpointError: it is not JSON, not an object, an object in it has a key twice, or a number is not finite.
    """
    try:
        value = parsing.parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{what} cannot be read as JSON: {error}") from error
    return _object(value, what)


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        CheckpointError: it is missing, unreadable, or something else.
    """
    try:
        value = parsing.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return _object(value, str(path))


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is a JSON {type(value).__name__}, expected an object")
    return value


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Write one JSON object to a file, in the style of transformers."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, such as of a file name that is not UTF-8
        data = (json.dumps(value, indent=2) + "\n").encode()
    path.write_bytes(data)
