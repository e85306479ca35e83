"""Public names of a package that load on first use, so that importing the package stays cheap.

What lives here: finding such a name. What may not: which names there are (each package's own `__init__.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load(package: str, public: Mapping[str, str], name: str) -> Any:
    """What a package's `__getattr__` answers.

    Args:
        package: its name.
        public: its public names, and the module that each comes from.
        name: the one wanted.

    Raises:
        AttributeError: it is none of them.
    """
    if name not in public:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(public[name]), name)
