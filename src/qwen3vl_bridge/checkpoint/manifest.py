"""The manifest that lies beside every result of ours: what it was made of, by what, how.

What lives here: its name, who wrote it, reading it. What may not: what goes into it (`conversion.py`).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.json_files import read_object

MANIFEST = "qwen3vl_bridge.json"


def tool() -> dict[str, str]:
    """Who wrote a result, for its manifest."""
    versions = {}
    for name in ("qwen3vl-bridge", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return {"tool": "qwen3vl_bridge", "version": versions["qwen3vl-bridge"], "torch": versions["torch"]}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a result; empty where there is none."""
    path = folder / MANIFEST
    return read_object(path) if path.is_file() else {}
