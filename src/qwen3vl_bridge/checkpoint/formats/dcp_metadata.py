"""The `.metadata` file of a torch.distributed.checkpoint folder: unpickled without running code, checked, plain data.

The unpickler is based on Python's own in its Python implementation. The one in C allocates whatever a memo index asks
for, so that a file of twenty bytes can use all memory.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, Extent, Shape, TensorSpec
from qwen3vl_bridge.io.files import CheckpointError, file_size, resolve_within
from qwen3vl_bridge.io.parsing import read_whole

FILE = ".metadata"
_MAX_DIMENSIONS, _MAX_BYTES = 32, 1 << 31


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


def _records(module: str, *names: str) -> dict[tuple[str, str], type[Record]]:
    return {(module, name): type(name, (Record,), {"kind": name, "__slots__": ()}) for name in names}


def _size(values: Any = ()) -> tuple[Any, ...]:
    if not isinstance(values, (tuple, list)):
        raise pickle.UnpicklingError(f"torch.Size of a {type(values).__name__}")
    return tuple(values)


def empty_dict() -> dict[Any, Any]:
    """What an OrderedDict begins as; its entries follow. One made of entries would hash whatever these are."""
    return {}


def _text(*parts: Any) -> str:
    return "/".join(str(part)[:4096] if isinstance(part, str | int) else type(part).__name__ for part in parts)


_DCP = "torch.distributed.checkpoint"
_PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath")
METADATA_GLOBALS: Mapping[tuple[str, str], Any] = {
    **_records(f"{_DCP}.metadata", "Metadata", "TensorStorageMetadata", "BytesStorageMetadata"),
    **_records(f"{_DCP}.metadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta"),
    **_records(f"{_DCP}.filesystem", "_StorageInfo"),
    # megatron-core leaves its writers' plans in the file; they are not read here.
    **_records(f"{_DCP}.planner", "SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData"),
    (f"{_DCP}.planner", "WriteItemType"): _text,
    **{("torch", name): name for name in ITEMSIZE},
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): empty_dict,
    ("torch.serialization", "_get_layout"): _text,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _text,
    **{(module, name): _text for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


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

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self._set([self.stack.pop(), value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        # A nested tuple of shared tuples can take exponential time to hash.
        if not all(isinstance(key, str | int | Record) for key in items[::2]):
            raise pickle.UnpicklingError("it has a key other than a name, a number or an index")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it has a pickle opcode that torch never writes")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    for _code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.DICT):
        dispatch[_code[0]] = _refuse
    for _code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        dispatch[_code[0]] = _refuse


def restricted_loads(
    data: bytes,
    what: str,
    allowed: Mapping[tuple[str, str], Any] = METADATA_GLOBALS,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle with a list of allowed globals; a CheckpointError if it is damaged or requires others.

    `what` names the pickle in the error, `allowed` has a replacement for each global, and `persistent` converts
    references to things outside the pickle; None refuses them.
    """
    try:
        return _Unpickler(data, allowed, persistent).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        truncated = "it is truncated, expected a complete pickle"  # that error is often without a message
        reason = truncated if isinstance(error, EOFError) else str(error) or type(error).__name__
        raise CheckpointError(f"{what} cannot be read: {reason}") from error


class Chunk(NamedTuple):
    """A box of a tensor, and the item that contains it."""

    offsets: Shape
    sizes: Shape
    item: Extent


@dataclass
class DcpMetadata:
    """Contents of a folder: (description, chunks) of the tensors, and the items other than tensors, by key."""

    folder: Path
    tensors: dict[str, tuple[TensorSpec, tuple[Chunk, ...]]] = field(default_factory=dict)
    byte_items: dict[str, Extent] = field(default_factory=dict)


def read_metadata(folder: Path) -> DcpMetadata:
    """Read and check `folder/.metadata`; a CheckpointError if it is damaged or contradicts itself."""
    path = folder / FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a torch.distributed.checkpoint folder: it has no {FILE}")
    try:
        data = read_whole(path, _MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if not data:
        raise CheckpointError(f"{path} is empty, expected torch.distributed.checkpoint Metadata")
    top = restricted_loads(data, str(path))
    if not isinstance(top, Record) or top.kind != "Metadata":
        raise CheckpointError(f"{path} holds a {_kind(top)}, expected torch.distributed.checkpoint Metadata")
    return _Checker(folder, path).check(top)


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Record) else type(value).__name__


def _shown(value: Any) -> str:
    """A value as text. Only plain values are printed, because a file's nested values may be endless."""
    if isinstance(value, tuple) and all(isinstance(entry, int) for entry in value):
        return str(value[:_MAX_DIMENSIONS])
    return str(value)[:120] if isinstance(value, (str, int, float, type(None))) else _kind(value)


class _Checker:
    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self.sizes: dict[str, tuple[Path, int]] = {}
        self.storage: dict[tuple[str, Shape | None], Any] = {}

    def check(self, top: Record) -> DcpMetadata:
        entries = self.expect(top.field("state_dict_metadata"), dict, "state_dict_metadata")
        for index, info in self.expect(top.field("storage_data"), dict, "storage_data").items():
            self.expect(index, "MetadataIndex", "storage_data")
            key, offset = self.expect(index.field("fqn"), str, "storage_data"), index.field("offset")
            self.storage[key, offset if offset is None else self.numbers(offset, f"{key}, storage_data")] = info
        result = DcpMetadata(self.folder)
        for key, entry in entries.items():
            self.expect(key, str, "a key")
            if _kind(entry) == "BytesStorageMetadata":
                result.byte_items[key] = self.item(self.storage.get((key, None)), key)
            else:
                result.tensors[key] = self.tensor(key, entry)
        return result

    def fail(self, where: str, found: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}, {where}: found {_shown(found)}, expected {expected}")

    def expect(self, value: Any, kind: type | str, where: str) -> Any:
        """The value, which has to be of a type, or a record of a kind."""
        if not (_kind(value) == kind if isinstance(kind, str) else isinstance(value, kind)):
            raise self.fail(where, _kind(value), kind if isinstance(kind, str) else kind.__name__)
        return value

    def numbers(self, value: Any, where: str) -> Shape:
        whole = isinstance(value, tuple) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
        if not whole or len(value) > _MAX_DIMENSIONS:
            raise self.fail(where, value, "a tuple of whole numbers")
        return value

    def tensor(self, key: str, entry: Any) -> tuple[TensorSpec, tuple[Chunk, ...]]:
        self.expect(entry, "TensorStorageMetadata", key)
        properties = self.expect(entry.field("properties"), "TensorProperties", key).state
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise self.fail(key, dtype, "a dtype")
        spec = TensorSpec(key, dtype, self.numbers(entry.field("size"), f"{key}, size"))
        chunks = self.expect(entry.field("chunks"), list, f"{key}, chunks")
        return spec, tuple(self.chunk(spec, chunk) for chunk in chunks)

    def chunk(self, spec: TensorSpec, chunk: Any) -> Chunk:
        self.expect(chunk, "ChunkStorageMetadata", spec.name)
        offsets = self.numbers(chunk.field("offsets"), f"{spec.name}, chunk offsets")
        sizes = self.numbers(chunk.field("sizes"), f"{spec.name}, chunk sizes")
        in_range = len(offsets) == len(sizes) == len(spec.shape) and all(
            offset + size <= whole for offset, size, whole in zip(offsets, sizes, spec.shape, strict=True)
        )
        if not in_range:
            raise self.fail(spec.name, f"a chunk of {sizes} at {offsets}", f"one inside {spec.shape}")
        item = self.item(self.storage.get((spec.name, offsets)), f"{spec.name}, chunk at {list(offsets)}")
        if item.length < math.prod(sizes) * ITEMSIZE[spec.dtype]:
            raise self.fail(spec.name, f"{item.length} bytes for a chunk of {sizes}", f"room for {spec.dtype}")
        return Chunk(offsets, sizes, item)

    def item(self, info: Any, where: str) -> Extent:
        self.expect(info, "_StorageInfo", where)
        if info.field("transform_descriptors"):
            raise self.fail(where, "one that is transformed", "an item stored as it is")
        relative = self.expect(info.field("relative_path"), str, f"{where}, file")
        offset, length = self.numbers((info.field("offset"), info.field("length")), f"{where}, place")
        if relative not in self.sizes:
            path = resolve_within(self.folder, relative, f"{self.path}, {where}")
            self.sizes[relative] = path, file_size(path, f"{self.path}, {where}")
        path, size = self.sizes[relative]
        if offset + length > size:
            raise CheckpointError(f"{path} has {size} bytes, expected {offset + length} at least, for {where}")
        return Extent(path, offset, length)
