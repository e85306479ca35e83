"""The manifest that lies beside every result of ours: what it was made of, by what, how.

What lives here: its name, who wrote it, reading it, and what by it belongs to a result. What may not: what goes into it
(`conversion.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import journal
from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.json_files import read_object
from qwen3vl_bridge.checkpoint.staging import refuse_others

MANIFEST = "qwen3vl_bridge.json"
_TOOL = "qwen3vl_bridge"


def tool() -> dict[str, str]:
    """Who wrote a result, for its manifest."""
    versions = {}
    for name in ("qwen3vl-bridge", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return {"tool": _TOOL, "version": versions["qwen3vl-bridge"], "torch": versions["torch"]}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a result; empty where there is none."""
    path = folder / MANIFEST
    return read_object(path) if path.is_file() else {}


def files_of(root: Path, inner: str) -> list[str]:
    """The files of a result that is finished but for its manifest, relative to its folder, in a fixed order."""
    paths = (Path(folder, name).relative_to(root) for folder, _, names in os.walk(root) for name in names)
    aside = Path(inner, MANIFEST)
    return sorted(path.as_posix() for path in paths if path != aside and path.parts[0] != journal.FOLDER)


def check_replaceable(root: Path, inner: str, known: Callable[[Path], Iterable[str]]) -> None:
    """Check that a folder is the result of an earlier conversion, and nothing besides.

    Args:
        root: the folder.
        inner: the folder in it that has the manifest.
        known: files that such a result may have, relative to the folder it is given; asked where the manifest, being of
            an earlier version, does not list them.

    Raises:
        CheckpointError: it is not.
    """
    manifest = read_manifest(root / inner)
    # A trainer of ours writes a manifest too, which has no format.
    if manifest.get("tool") != _TOOL or "format" not in manifest:
        name = (Path(inner) / MANIFEST).as_posix()
        raise CheckpointError(
            f"{root} is no checkpoint that a conversion of this kind wrote: it has no {name} that says so; so it is "
            "not replaced, remove it yourself"
        )
    listed = manifest.get("files")
    if not isinstance(listed, list):
        listed = known(root)
    refuse_others(root, {(Path(inner) / MANIFEST).as_posix(), *map(str, listed)}, "checkpoint")
