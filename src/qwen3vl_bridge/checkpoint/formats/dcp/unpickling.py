"""Unpickles only what torch.distributed.checkpoint writes: no code of the file's choosing ever runs.

It is based on Python's own unpickler in its Python implementation. The one in C allocates whatever a memo index asks
for, so that a file of twenty bytes can use all memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from qwen3vl_bridge.checkpoint.formats.tensor_specs import ITEMSIZE
from qwen3vl_bridge.io.errors import CheckpointError


class Record:
    """An instance of an allowed class: its name and its state, whatever that is."""

    __slots__ = ("state",)
    kind = ""
    state: Any

    def __new__(cls) -> Record:
        """An unpickler creates instances without calling __init__."""
        record = super().__new__(cls)
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        # A frozen dataclass or an enum comes with a state too; a second one would be an attempt to change the first.
        if self.state is not None:
            raise pickle.UnpicklingError(f"{self.kind} has two states")
        self.state = state

    def field(self, name: str) -> Any:
        """A field of a dataclass, None if it does not exist."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def _key(self) -> tuple[Any, ...]:
        return (self.kind, self.field("fqn"), self.field("offset"))

    def __hash__(self) -> int:
        kind, key, offset = self._key()
        flat = offset is None or (isinstance(offset, tuple) and all(isinstance(number, int) for number in offset))
        if not isinstance(key, str) or not flat:
            raise pickle.UnpicklingError(f"{kind} with another key than a name and an offset")
        return hash((kind, key, offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self._key() == other._key()


def _record(name: str) -> type[Record]:
    return type(name, (Record,), {"kind": name, "__slots__": ()})


def _size(values: Any = ()) -> tuple[Any, ...]:
    if not isinstance(values, (tuple, list)):
        raise pickle.UnpicklingError(f"torch.Size of a {type(values).__name__}")
    return tuple(values)


def _text(*parts: Any) -> str:
    return "/".join(str(part)[:4096] if isinstance(part, str | int) else type(part).__name__ for part in parts)


_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    (_METADATA, name): _record(name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _record("_StorageInfo")}

# megatron-core leaves its writers' plans in the file; they are not read here.
_PLANNER = "torch.distributed.checkpoint.planner"
_PLANS = {(_PLANNER, name): _record(name) for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")}

METADATA_GLOBALS: Mapping[tuple[str, str], Any] = {
    **_CLASSES,
    **_PLANS,
    (_PLANNER, "WriteItemType"): _text,
    **{("torch", name): name for name in ITEMSIZE},
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): dict,
    ("torch.serialization", "_get_layout"): _text,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _text,
    **{("pathlib", name): _text for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")},
    **{("pathlib._local", name): _text for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")},
}


_MAX_DEPTH = 4


def _depth(value: Any) -> int:
    """Nesting depth of tuples; stops at the maximum that matters."""
    deepest, level = 0, {id(value): value}
    while deepest <= _MAX_DEPTH and (level := {i: entry for i, entry in level.items() if isinstance(entry, tuple)}):
        deepest, level = deepest + 1, {id(entry): entry for outer in level.values() for entry in outer}
    return deepest


class _Memo(list):
    """Unpickled values by number. Uses a tenth of the memory of Python's dictionary for it."""

    def __setitem__(self, number: Any, value: Any) -> None:
        if number == len(self):
            self.append(value)
        elif number < len(self):
            super().__setitem__(number, value)
        else:
            raise pickle.UnpicklingError(f"it memoizes entry {number}, expected {len(self)}")


# Its internal methods, which are overridden here, have no type annotations.
_Base: Any = pickle._Unpickler


class _Unpickler(_Base):
    dispatch: ClassVar = dict(_Base.dispatch)

    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] | None):
        super().__init__(io.BytesIO(data))
        self.memo = _Memo()
        self._allowed = allowed
        self._persistent = persistent

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self._allowed[module_name, global_name]
        except (KeyError, TypeError):
            raise pickle.UnpicklingError(f"it calls for {module_name}.{global_name}, which is not allowed") from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to something outside itself")
        return self._persistent(pid)

    def load_build(self) -> None:
        # Python's own would set attributes of any object on the stack, including our functions and classes.
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise pickle.UnpicklingError(f"it sets the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].__setstate__(state)

    def load_tuple_of(self, load: Callable[[Any], None]) -> None:
        # Nested, shared tuples can take exponential time to compare or to hash.
        load(self)
        if _depth(self.stack[-1]) > _MAX_DEPTH:
            raise pickle.UnpicklingError(f"it nests tuples more than {_MAX_DEPTH} deep")

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it has a pickle opcode that torch never writes")

    dispatch[pickle.BUILD[0]] = load_build
    for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[_code[0]] = lambda self, load=_Base.dispatch[_code[0]]: self.load_tuple_of(load)
    for _code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER):
        dispatch[_code[0]] = _refuse


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):  # often without a message
        return "it is truncated, expected a complete pickle"
    return str(error) or type(error).__name__


def restricted_loads(
    data: bytes,
    what: str,
    allowed: Mapping[tuple[str, str], Any] = METADATA_GLOBALS,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle with a list of allowed globals.

    Args:
        data: the pickle.
        what: its name, for the error.
        allowed: (module, name) -> replacement for that global.
        persistent: converts references to things outside the pickle; None refuses them.

    Raises:
        CheckpointError: it is damaged or requires other globals.
    """
    try:
        return _Unpickler(data, allowed, persistent).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(f"{what} cannot be read: {_reason(error)}") from error
