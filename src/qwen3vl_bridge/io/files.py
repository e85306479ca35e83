"""Paths given by a user or a checkpoint's own files, JSON files of one object, and the one exception for bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from qwen3vl_bridge.io import parsing


class CheckpointError(ValueError):
    """Bad input: something about a checkpoint, a path or an option is invalid.

    Its message names the thing, what was found and what was expected; the command line prints only the message.
    """


def user_cache() -> Path:
    """This package's folder in the user's cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qwen3vl_bridge"


def expanded(path: str | Path) -> Path:
    """A user's path, with `~` and `~someone` expanded; a CheckpointError if that user does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{path}: {Path(path).parts[0]} is not the home folder of any user here") from None


def absolute(path: str | Path) -> Path:
    """As `expanded`, and absolute; symbolic links are not resolved."""
    return Path(os.path.abspath(expanded(path)))


def resolve_within(folder: Path, relative: object, named_by: str) -> Path:
    """The file of a checkpoint's folder that an index or a metadata file, `named_by`, names.

    Only the spelling is checked: the files of a download cache are symbolic links to elsewhere.

    Raises:
        CheckpointError: the path is empty, absolute or leads out of the folder.
    """
    if not isinstance(relative, str) or not relative or "\0" in relative:
        raise CheckpointError(f"{named_by} names the file {relative!r}, expected a path inside {folder}")
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or "\\" in relative or path == PurePosixPath("."):
        raise CheckpointError(f"{named_by} names the file {relative!r}, which is outside {folder}")
    return folder / path


def file_size(path: Path, named_by: str) -> int:
    """Size of a file that must be there; a CheckpointError if it is missing, unreadable, or not a file."""
    try:
        if not path.is_file():
            found = "something that is not a file" if path.exists() else "nothing"
            raise CheckpointError(f"{path}: found {found}, expected a file, which {named_by} names")
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; {named_by} names it") from error


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object; a CheckpointError if it is missing, unreadable, or something else."""
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
