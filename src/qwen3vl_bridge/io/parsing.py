"""JSON and YAML from untrusted files, parsed within limits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

# Deeper than any configuration. Parsers and functions that walk through a value recurse once per level.
MAX_DEPTH = 50
_TOO_DEEP = f"nests objects or lists more than {MAX_DEPTH} deep"
# Larger than any index of tensors, and than any configuration of a run.
_JSON_BYTES, _YAML_BYTES = 1 << 28, 1 << 24
# Of a YAML text with every alias expanded.
_YAML_NODES = 200_000
# Of an integer. A larger one is not a count of anything, and may be too large to be printed or to become a float.
_BITS = 64
# What transformers writes for a tokenizer's `model_max_length` if there is none.
_UNLIMITED = int(1e30)
# Digits of a number. Reading and printing take time quadratic in their number.
_LETTERS = 100
_YAML_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_whole(path: Path, at_most: int) -> bytes:
    """The contents of a file of at most a given size; a ValueError if it is longer."""
    size = path.stat().st_size
    if size > at_most:
        raise ValueError(f"{path} has {size:,} bytes, expected at most {at_most:,}")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """The contents of a JSON file with a configuration; as `parse_json`, with a message that names the file."""
    text = read_whole(path, _JSON_BYTES)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error


def parse_json(text: bytes | str) -> Any:
    """Parse JSON: UTF-8, no duplicate keys in an object, finite numbers, within limits; else a ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise ValueError(f"{twice!r} occurs twice")
        return names

    def whole(digits: str) -> int:  # one that is too large becomes a value that `check_plain` rejects, by its name
        return int(digits[:_LETTERS])

    try:
        value = json.loads(_as_text(text), object_pairs_hook=unique, parse_int=whole)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_plain(value)
    return value


def parse_record(text: bytes | str) -> Any:
    """Parse one JSON text among many, such as a line of a data set.

    Unlike in a configuration, keys may be duplicate (the last one counts), and numbers need not be finite: unused
    columns may contain anything. A ValueError if it is not JSON in UTF-8, or nested too deeply.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_plain(value, finite=False, bounded=False)
    return value


def read_yaml(path: Path) -> Any:
    """The contents of a YAML file of plain values. Numbers that are not finite are checked by `check_plain`.

    Megatron-Bridge's own settings of an optimizer include an infinity.

    Raises:
        ValueError: it is not such YAML, too large or nested too deeply; the message names the file.
        OSError: it cannot be read.
    """
    import yaml

    text = check_yaml(path)
    try:
        value = yaml.load(text, Loader=_yaml_loader())
        check_plain(value, finite=False)
        return value
    except Exception as error:  # PyYAML's constructors raise whatever a value's conversion does
        raise ValueError(f"{path}: {_one_line(error)}") from error


def check_yaml(path: Path) -> str:
    """Check that any parser can parse a YAML file within limits; returns its text. Fails as `read_yaml`."""
    import yaml

    data = read_whole(path, _YAML_BYTES)
    try:
        text = _as_text(data)
        _check_events(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {_one_line(error)}") from error
    return text


def check_plain(value: Any, name: str = "", *, finite: bool = True, bounded: bool = True) -> None:
    """Raise a ValueError if objects and lists are nested too deeply, or numbers in them not `finite`, or integers of
    more than 64 bits (but 1e30) unless they are not `bounded`; `name` is the value's in messages.
    """
    level, depth = [(name, value)], 0
    while level:
        inner: list[tuple[str, Any]] = []
        for path, entry in level:
            if isinstance(entry, dict | list) and depth == MAX_DEPTH:
                raise ValueError(_TOO_DEEP)
            if isinstance(entry, list):
                inner += ((path, part) for part in entry)
            elif isinstance(entry, dict):
                inner += ((f"{path}.{key}" if path else str(key), part) for key, part in entry.items())
            elif finite and isinstance(entry, float) and not math.isfinite(entry):
                raise ValueError(f"{path or 'the value'} is {entry}, expected a finite number")
            elif bounded and isinstance(entry, int) and entry.bit_length() > _BITS and entry != _UNLIMITED:
                raise ValueError(
                    f"{path or 'the value'} is an integer of more than {_BITS} bits, expected a smaller one"
                )
        level, depth = inner, depth + 1


def _as_text(text: bytes | str) -> str:
    return text if isinstance(text, str) else text.decode("utf-8")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _yaml_loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_events(text: str) -> None:
    """Walk through a YAML text without constructing values.

    PyYAML's constructor recurses once per level, in C too, where too deep recursion ends the process. Its parser does
    not, and reads only as far as requested. An alias costs nothing to construct, but its expansion does to code that
    walks through it.
    """
    import yaml

    nodes, sizes, resolver = 0, dict[str, int](), yaml.SafeLoader("")
    open_nodes: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=_yaml_loader()):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, nodes))
            nodes += 1
            if len(open_nodes) > MAX_DEPTH:
                raise ValueError(_TOO_DEEP)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor:
                sizes[anchor] = nodes - before
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias *{event.anchor} refers to a node that contains it, or is undefined")
            nodes += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            if event.anchor:
                sizes[event.anchor] = 1
            if len(event.value) > _LETTERS:
                # PyYAML has no limit for a number to the base 60, `1:2:3`.
                tag = event.tag
                if tag is None or tag == "!":
                    tag = resolver.resolve(yaml.ScalarNode, event.value, event.implicit)
                if tag in _YAML_NUMBERS:
                    line, found = event.start_mark.line + 1, f"{event.value[:20]}... of {len(event.value):,} letters"
                    raise ValueError(f"line {line} has the number {found}, expected at most {_LETTERS}")
        if nodes > _YAML_NODES:
            raise ValueError(f"found more than {_YAML_NODES:,} values with all aliases written out")
