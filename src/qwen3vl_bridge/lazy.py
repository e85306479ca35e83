"""Public names of a package that are imported on first use, so that importing the package stays cheap."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load(package: str, public: Mapping[str, str], name: str) -> Any:
    """The result of a package's `__getattr__` for a name, by its public names and the module of each."""
    if name not in public:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(public[name]), name)
