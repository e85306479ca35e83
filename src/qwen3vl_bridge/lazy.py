"""Import public names on first use, so that importing a package stays fast, and find optional packages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attributes(package: str, public: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` functions for a package that import its public names on first use.

    Args:
        package: name of the package.
        public: public name -> module that defines it.
    """

    def get(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(public[name]), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *public})


def is_installed(package: str) -> bool:
    """Return True if a top-level package can be imported, without importing it.

    A module in `sys.modules` without `__spec__` counts as not installed: it is a stub that another library put there.
    """
    stub = package in sys.modules and getattr(sys.modules[package], "__spec__", None) is None
    return not stub and importlib.util.find_spec(package) is not None
