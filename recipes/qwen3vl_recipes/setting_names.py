"""Names of a run's settings without the imports that take ten seconds: read from the sources of the classes."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from qwen3vl_bridge.models.rules import named_elsewhere, suggestion

# The classes of sections whose field is declared with a base class; of others, the field's annotation tells.
_CONTAINER = "qwen3vl_bridge.training.config.Qwen3VLConfigContainer"
_CLASSES = {
    "model": (
        "qwen3vl_bridge.models.qwen3_vl.provider.Qwen3VLMoEModelProvider",
        "qwen3vl_bridge.models.qwen3_5.provider.Qwen35VLMoEModelProvider",
    ),
    "dataset": ("qwen3vl_bridge.data.dataset_provider.Qwen3VLConversationProvider",),
    "peft": ("qwen3vl_bridge.peft.lora.Qwen3VLLoRA", "qwen3vl_bridge.peft.lora.Qwen3VLDoRA"),
    "optimizer_config_override_provider": ("qwen3vl_bridge.training.config.Qwen3VLLearningRates",),
}


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse names of settings that no recipe of this package has; a name below a field's own is not looked at.

    Raises:
        ValueError: such a name; the message has the nearest ones.
    """
    for name in names:
        section, _, rest = name.partition(".")
        try:
            known = section in _fields(_CONTAINER) and (not rest or _has(section, rest.partition(".")[0]))
        except (OSError, SyntaxError):  # the sources are not there; the configuration itself will tell
            return
        if not known:
            raise ValueError(f"there is no setting {name}{suggestion(name, sorted(_all(), reverse=True))}")


def meant_by(word: str, value: str) -> str | None:
    """The settings, with a value, that are meant by a word without a section, such as "lr"; None if there are none."""
    word = word.replace("-", "_")
    if (settings := named_elsewhere(word, value)) is not None:
        return settings
    try:
        names = sorted(_all(), key=lambda name: (name.startswith("model."), name), reverse=True)
        found = next((name for name in names if name.rpartition(".")[2] == word), None)
    except (OSError, SyntaxError):
        return None
    return found and f"{found}={value}"


def _has(section: str, field: str) -> bool:
    classes = list(_classes(section))
    return not classes or any(field in _fields(one) for one in classes)


def _all() -> set[str]:
    """All names of two parts."""
    sections = (name for name in _fields(_CONTAINER) if not name.startswith("_"))
    return {f"{section}.{field}" for section in sections for one in _classes(section) for field in _fields(one)}


def _classes(section: str) -> Iterator[str]:
    """Dotted names of the classes that a section may be of; none if its fields cannot be known, as of a `dict`."""
    if section in _CLASSES:
        yield from _CLASSES[section]
        return
    module, annotation = _fields(_CONTAINER)[section]
    for node in ast.walk(annotation):
        found = _resolved(module, node.id) if isinstance(node, ast.Name) else None
        if found and _fields(found):
            yield found


@functools.cache
def _fields(dotted: str) -> dict[str, tuple[str, ast.expr]]:
    """A dataclass's fields with its bases': by name, the module that declares it and the annotation there."""
    module, _, name = dotted.rpartition(".")
    body = _tree(module)
    definition = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for base in reversed(definition.bases):
        one = base.value if isinstance(base, ast.Subscript) else base
        owner, _, last = ast.unparse(one).rpartition(".")
        if resolved := _resolved(module, owner or last):
            found |= _fields(f"{resolved}.{last}" if owner else resolved)
    declared = [one for one in definition.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    return found | {ast.unparse(one.target): (module, one.annotation) for one in declared}


@functools.cache
def _resolved(module: str, name: str) -> str | None:
    """The dotted name of a class, or of a module, that a module knows by a name; None for other things."""
    for node in _tree(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return f"{module}.{name}"
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) != name:
                    continue
                package = module if _file(module).name == "__init__.py" else module.rpartition(".")[0]
                up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*up, *([node.module] if node.module else [])])
                if source.partition(".")[0] not in ("megatron", "qwen3vl_bridge"):
                    return None
                return (
                    f"{source}.{alias.name}" if _is_module(f"{source}.{alias.name}") else _resolved(source, alias.name)
                )
    return None


@functools.cache
def _tree(module: str) -> list[ast.stmt]:
    return [*_statements(ast.parse(_file(module).read_text()).body)]


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also within `try` and `if`, where some imports are."""
    for node in body:
        yield node
        if isinstance(node, ast.Try | ast.If):
            yield from _statements(node.body)


def _file(module: str) -> Path:
    """The source of a module; importing its package is what takes long. OSError if there is none."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place, *rest)
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return file
    raise FileNotFoundError(module)


def _is_module(dotted: str) -> bool:
    try:
        return bool(_file(dotted))
    except OSError:
        return False
