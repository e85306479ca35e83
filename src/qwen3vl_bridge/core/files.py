"""Resolve paths that users and checkpoints give, and read JSON, YAML and pickle files from untrusted sources.

Every reader has limits, so that a damaged or malicious file gives an error instead of using all memory or running code.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from qwen3vl_bridge.upstream.python_unpickler import PythonUnpickler

# Deeper than any configuration. Parsers, and functions that walk through a value, recurse once per level.
MAX_DEPTH = 50
_TOO_DEEP = f"objects or lists are nested more than {MAX_DEPTH} deep"
# Larger than any index of tensors, and than any configuration of a run.
_MAX_JSON_BYTES, _MAX_YAML_BYTES = 1 << 28, 1 << 24
# Values in a YAML text with every alias expanded.
_MAX_YAML_VALUES = 200_000
# Larger integers are not a count of anything. They may be too large to print or to convert to a float.
_MAX_INTEGER_BITS = 64
# transformers writes this as a tokenizer's `model_max_length` if there is no maximum.
_UNLIMITED = int(1e30)
# The time to parse or print a number is quadratic in its digits.
_MAX_DIGITS = 100
_YAML_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class CheckpointError(ValueError):
    """Invalid input: a checkpoint, a path or an option.

    The message names the object, the value found and the value expected. The command line prints only the message.
    """


def user_cache() -> Path:
    """Return this package's folder in the user's cache. It may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qwen3vl_bridge"


def expanded(path: str | Path) -> Path:
    """Return a path with `~` or `~someone` expanded. Raise CheckpointError if that user does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{path}: {Path(path).parts[0]} is not the home folder of any user here") from None


def absolute(path: str | Path) -> Path:
    """Return a path as an absolute path with `~` expanded. Symbolic links are not resolved."""
    return Path(os.path.abspath(expanded(path)))


def resolve_within(folder: Path, relative: object, named_by: str) -> Path:
    """Return the path of a checkpoint's file, given its relative path in an index or a metadata file.

    Symbolic links are not resolved: the files of a download cache are links to another folder.

    Args:
        folder: the checkpoint's folder.
        relative: the path in the index, relative to `folder`.
        named_by: the index or metadata file, for errors.

    Raises:
        CheckpointError: the path is empty, absolute or leads out of the folder.
    """
    if not isinstance(relative, str) or not relative or "\0" in relative:
        raise CheckpointError(f"{named_by} names the file {relative!r}, expected a path inside {folder}")
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or "\\" in relative or path == PurePosixPath("."):
        raise CheckpointError(f"{named_by} names the file {relative!r}, which is outside {folder}")
    return folder / path


def is_open_at(descriptor: int, path: Path) -> bool:
    """Return whether a path refers to the open file or folder `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def file_size(path: Path, named_by: str) -> int:
    """Return the size of a file in bytes. Raise CheckpointError if it is missing, unreadable, or not a file.

    `named_by` is the file that refers to `path`, for error messages.
    """
    try:
        if not path.is_file():
            found = "something that is not a file" if path.exists() else "nothing"
            raise CheckpointError(f"{path}: found {found}, expected a file, because {named_by} names it")
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; {named_by} names it") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains one object. Raise CheckpointError if it is missing, unreadable or invalid."""
    try:
        value = read_json(path)
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
    """Write one JSON object to a file, formatted as transformers does."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, such as from a file name that is not UTF-8
        data = (json.dumps(value, indent=2) + "\n").encode()
    path.write_bytes(data)


def read_bytes(path: Path, at_most: int) -> bytes:
    """Return the contents of a file. Raise ValueError if it has more than `at_most` bytes."""
    size = path.stat().st_size
    if size > at_most:
        raise ValueError(f"{path} has {size:,} bytes, expected at most {at_most:,}")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Read a JSON file strictly, see `parse_json`. Raise ValueError for invalid JSON, OSError on failure to read."""
    text = read_bytes(path, _MAX_JSON_BYTES)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error


def parse_json(text: bytes | str) -> Any:
    """Parse JSON strictly.

    Raises:
        ValueError: the text is not JSON in UTF-8, an object has duplicate keys, a number is not finite or too large, or
            values are nested too deeply.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise ValueError(f"{twice!r} occurs twice as a key of one object: remove one of the entries")
        return names

    def integer(digits: str) -> int:  # one that is too large becomes a value that `check_plain` rejects, with its key
        return int(digits[:_MAX_DIGITS])

    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique_keys, parse_int=integer)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_plain(value)
    return value


def parse_record(text: bytes | str) -> Any:
    """Parse one JSON record, such as a line of a data set. Raise ValueError if it is not JSON or nested too deeply.

    `parse_json` has stricter rules. Here a key may occur twice (the last value is used), and numbers may be infinite,
    NaN or of any size: columns of a data set that nobody uses may contain anything.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_plain(value, finite=False, bounded=False)
    return value


def check_plain(value: Any, name: str = "", *, finite: bool = True, bounded: bool = True) -> None:
    """Check that JSON or YAML values stay within limits.

    Args:
        value: dictionaries, lists and scalars.
        name: name of the value, for errors.
        finite: whether infinity and NaN are errors.
        bounded: whether integers of more than 64 bits are errors. `int(1e30)` is always accepted.

    Raises:
        ValueError: a number is invalid, or dictionaries and lists are nested too deeply.
    """
    level, depth = [(name, value)], 0
    while level:
        inner: list[tuple[str, Any]] = []
        for path, entry in level:
            if isinstance(entry, dict | list) and depth == MAX_DEPTH:
                raise ValueError(_TOO_DEEP)
            if isinstance(entry, list):
                inner += ((path, child) for child in entry)
            elif isinstance(entry, dict):
                inner += ((f"{path}.{key}" if path else str(key), child) for key, child in entry.items())
            elif finite and isinstance(entry, float) and not math.isfinite(entry):
                raise ValueError(f"{path or 'the value'} is {entry}, expected a finite number")
            elif bounded and isinstance(entry, int) and entry.bit_length() > _MAX_INTEGER_BITS and entry != _UNLIMITED:
                raise ValueError(
                    f"{path or 'the value'} is an integer of more than {_MAX_INTEGER_BITS} bits, expected a smaller one"
                )
        level, depth = inner, depth + 1


def read_yaml(path: Path) -> Any:
    """Read a YAML file of plain values. Infinity is allowed: Megatron-Bridge's optimizer settings contain it.

    Raises:
        ValueError: the file is not such YAML, too large, or nested too deeply. The message names the file.
        OSError: the file cannot be read.
    """
    import yaml

    text = check_yaml(path)
    try:
        value = yaml.load(text, Loader=_yaml_loader())
        check_plain(value, finite=False)
        return value
    except Exception as error:  # PyYAML's constructors raise any exception that converting a value raises
        raise ValueError(f"{path}: {_one_line(error)}") from error


def check_yaml(path: Path) -> str:
    """Check the depth and the number of values of a YAML file, and return its text. Raises errors as `read_yaml`."""
    import yaml

    data = read_bytes(path, _MAX_YAML_BYTES)
    count, sizes, resolver = 0, dict[str, int](), yaml.SafeLoader("")
    open_nodes: list[tuple[str | None, int]] = []
    try:
        text = data.decode("utf-8")
        for event in yaml.parse(text, Loader=_yaml_loader()):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, count))
                count += 1
                if len(open_nodes) > MAX_DEPTH:
                    raise ValueError(_TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor:
                    sizes[anchor] = count - before
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ValueError(f"the alias *{event.anchor} refers to a node that contains it, or is undefined")
                count += sizes[event.anchor]
            elif isinstance(event, yaml.ScalarEvent):
                count += 1
                if event.anchor:
                    sizes[event.anchor] = 1
                if len(event.value) > _MAX_DIGITS:
                    # PyYAML has no limit for a number to the base 60, such as `1:2:3`.
                    tag = event.tag
                    if tag is None or tag == "!":
                        tag = resolver.resolve(yaml.ScalarNode, event.value, event.implicit)
                    if tag in _YAML_NUMBERS:
                        line, shown = (
                            event.start_mark.line + 1,
                            f"{event.value[:20]}... of {len(event.value):,} characters",
                        )
                        raise ValueError(
                            f"line {line} has the number {shown}, expected at most {_MAX_DIGITS} characters"
                        )
            if count > _MAX_YAML_VALUES:
                raise ValueError(f"found more than {_MAX_YAML_VALUES:,} values with all aliases written out")
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {_one_line(error)}") from error
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _yaml_loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class PickledRecord:
    """An unpickled instance of an allowed class, reduced to the name of the class and the state."""

    __slots__ = ("state",)
    kind = ""
    state: Any

    def __new__(cls) -> PickledRecord:
        """Create an instance without a state: an unpickler does not call __init__."""
        record = super().__new__(cls)
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        # Frozen dataclasses and enums have one state. A second one would be an attempt to change the first.
        if self.state is not None:
            raise pickle.UnpicklingError(f"it sets the state of a {self.kind} twice")
        self.state = state

    def field(self, name: str) -> Any:
        """Return the field `name` of a pickled dataclass, or None if it does not exist."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def load_pickle(
    data: bytes,
    what: str,
    allowed: Mapping[tuple[str, str], Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle data that refers only to allowed globals, without executing code from the pickle.

    Args:
        data: the pickle.
        what: name of the pickle, for errors.
        allowed: (module, name) of each allowed global -> the object to use instead.
        persistent: converts references to objects outside the pickle; None if it must not contain any.

    Raises:
        CheckpointError: the pickle is damaged or refers to other globals.
    """
    try:
        return _RestrictedUnpickler(data, allowed, persistent).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        truncated = "it is truncated, expected a complete pickle"  # EOFError often has no message
        reason = truncated if isinstance(error, EOFError) else str(error) or type(error).__name__
        raise CheckpointError(f"{what} cannot be read: {reason}") from error


class _Memo(list):
    """The memo of an unpickler as a list, in a tenth of the memory of the dictionary that Python uses."""

    def __setitem__(self, number: Any, value: Any) -> None:
        if number == len(self):
            self.append(value)
        elif number < len(self):
            super().__setitem__(number, value)
        else:
            raise pickle.UnpicklingError(f"it stores memo entry {number}, but the next free entry is {len(self)}")


class _RestrictedUnpickler(PythonUnpickler):
    # Python's unpickler in C would allocate memory for any memo index: a file of twenty bytes can use all memory.
    dispatch: ClassVar = dict(PythonUnpickler.dispatch)

    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] | None):
        super().__init__(io.BytesIO(data))
        self.memo = _Memo()
        self._allowed = allowed
        self._persistent = persistent

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self._allowed[module_name, global_name]
        except (KeyError, TypeError):
            raise pickle.UnpicklingError(
                f"the file refers to {module_name}.{global_name}, which is not among the allowed names"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to an object outside the pickle")
        return self._persistent(pid)

    def load_build(self) -> None:
        # Python's own method would set attributes of any object on the stack, including our functions and classes.
        state = self.stack.pop()
        if not isinstance(self.stack[-1], PickledRecord):
            raise pickle.UnpicklingError(f"it sets the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].__setstate__(state)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        # A nested tuple of shared tuples can take exponential time to hash.
        if not all(isinstance(key, str | int | PickledRecord) for key in items[::2]):
            raise pickle.UnpicklingError("it has a key other than a name, a number or an index")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _reject_opcode(self) -> None:
        raise pickle.UnpicklingError("it has a pickle opcode that torch never writes")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    for _code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.DICT):
        dispatch[_code[0]] = _reject_opcode
    for _code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        dispatch[_code[0]] = _reject_opcode
