"""Python's own implementation of unpickling, whose methods for single opcodes can be overridden.

Borrowed: `pickle._Unpickler`. The public `pickle.Unpickler` is implemented in C and overrides only `find_class` and
`persistent_load`: opcodes that set attributes or call functions cannot be rejected. Delete this module when Python
documents a name for it.
"""

from __future__ import annotations

import pickle
from typing import Any

PythonUnpickler: Any = pickle._Unpickler  # its methods for opcodes have no type annotations
