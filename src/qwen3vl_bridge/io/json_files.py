"""JSON files of checkpoints: one object per file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen3vl_bridge.io import parsing
from qwen3vl_bridge.io.errors import CheckpointError


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
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is a JSON {type(value).__name__}, expected an object")
    return value


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Write one JSON object to a file, in the style of transformers."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, such as from a file name that is not UTF-8
        data = (json.dumps(value, indent=2) + "\n").encode()
    path.write_bytes(data)
