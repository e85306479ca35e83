"""Python's own implementation of unpickling, whose methods for single opcodes can be overridden.

Used: `pickle._Unpickler`. The public `pickle.Unpickler` is implemented in C. Its subclasses can only override
`find_class` and `persistent_load`, and cannot reject opcodes that set attributes or call functions. Delete this
module when Python documents a name for it.
"""

from __future__ import annotations

import pickle
from typing import Any

PythonUnpickler: Any = pickle._Unpickler  # its methods for opcodes have no type annotations
