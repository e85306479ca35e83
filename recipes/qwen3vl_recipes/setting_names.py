"""Check names of settings against the source files of the classes that declare them.

Importing these classes takes ten seconds. By reading source files instead, the command rejects a misspelled name at
once.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.config.other_trainers import suggest_settings, translate_setting

_CONTAINER = "qwen3vl_bridge.training.config.Qwen3VLConfigContainer"
# Section -> classes that it may have, where the container's annotation is only a base class. The annotations of other
# sections name their class.
_CLASSES = {
    "model": (
        "qwen3vl_bridge.models.qwen3_vl.provider.Qwen3VLMoEModelProvider",
        "qwen3vl_bridge.models.qwen3_5.provider.Qwen35VLMoEModelProvider",
        "qwen3vl_bridge.models.qwen4_exp.provider.Qwen4ExpModelProvider",
    ),
    "dataset": ("qwen3vl_bridge.data.dataset_provider.Qwen3VLConversationProvider",),
    "checkpoint": ("qwen3vl_bridge.training.config.Qwen3VLCheckpointConfig",),
    "peft": ("qwen3vl_bridge.peft.lora.Qwen3VLLoRA", "qwen3vl_bridge.peft.lora.Qwen3VLDoRA"),
    "optimizer_config_override_provider": ("qwen3vl_bridge.training.config.Qwen3VLLearningRates",),
}


def flatten_settings(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by full name, such as "optimizer.lr". An empty dict counts as a value."""
    if not isinstance(settings, dict) or not settings:
        return {prefix: settings} if prefix else {}
    return {
        name: value
        for key, inner in settings.items()
        for name, value in flatten_settings(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def check_names(names: Iterable[str]) -> None:
    """Check that settings such as "optimizer.lr" exist. Only the section and the field of a name are checked.

    Raises:
        ValueError: no recipe of this package has a setting with this name. The message lists similar names.
    """
    for name in names:
        section, _, rest = name.partition(".")
        field = rest.partition(".")[0]
        try:
            known = section in _read_fields(_CONTAINER)
            if known and field and (classes := list(_section_classes(section))):
                known = any(field in _read_fields(one) for one in classes)
        except (OSError, SyntaxError):  # no source files; the configuration itself rejects wrong names later
            return
        if not known:
            raise ValueError(f"there is no setting {name}{suggest_settings(name, sorted(_all_names(), reverse=True))}")


def find_setting(word: str, value: str) -> str | None:
    """Return the full setting for a name without a section, such as "optimizer.lr=VALUE" for "lr"; None if unknown."""
    word = word.replace("-", "_")
    if (settings := translate_setting(word, value)) is not None:
        return settings
    try:
        names = sorted(_all_names(), key=lambda name: (name.startswith("model."), name), reverse=True)
    except (OSError, SyntaxError):
        return None
    found = next((name for name in names if name.rpartition(".")[2] == word), None)
    return found and f"{found}={value}"


def _all_names() -> set[str]:
    sections = (name for name in _read_fields(_CONTAINER) if not name.startswith("_"))
    return {
        f"{section}.{field}" for section in sections for one in _section_classes(section) for field in _read_fields(one)
    }


def _section_classes(section: str) -> Iterator[str]:
    """Yield the dotted names of the classes of a section. Yield none for a `dict`, which has no declared fields."""
    if section in _CLASSES:
        yield from _CLASSES[section]
        return
    module, annotation = _read_fields(_CONTAINER)[section]
    for node in ast.walk(annotation):
        found = _resolve(module, node.id) if isinstance(node, ast.Name) else None
        if found and _read_fields(found):
            yield found


@functools.cache
def _read_fields(dotted: str) -> dict[str, tuple[str, ast.expr]]:
    """Return (declaring module, annotation) of each field of a dataclass and its base classes, by field name."""
    module, _, name = dotted.rpartition(".")
    definition = next(node for node in _statements(module) if isinstance(node, ast.ClassDef) and node.name == name)
    fields = {}
    for base in reversed(definition.bases):
        base = base.value if isinstance(base, ast.Subscript) else base
        owner, _, last = ast.unparse(base).rpartition(".")
        if resolved := _resolve(module, owner or last):
            fields |= _read_fields(f"{resolved}.{last}" if owner else resolved)
    declared = [
        node for node in definition.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return fields | {ast.unparse(node.target): (module, node.annotation) for node in declared}


@functools.cache
def _resolve(module: str, name: str) -> str | None:
    """Return the dotted name of the class or module that `name` refers to within a module; None for anything else."""
    for node in _statements(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return f"{module}.{name}"
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) != name:
                continue
            source = node.module or ""
            if node.level:
                package = module if _source_file(module).name == "__init__.py" else module.rpartition(".")[0]
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*parents, *filter(None, [source])])
            if source.partition(".")[0] not in ("megatron", "qwen3vl_bridge"):
                return None
            try:
                return f"{source}.{alias.name}" if _source_file(f"{source}.{alias.name}") else None
            except OSError:  # not a module
                return _resolve(source, alias.name)
    return None


@functools.cache
def _statements(module: str) -> list[ast.stmt]:
    """Return the statements of a module, including those in `try` and `if`, which contain some imports."""

    def flatten(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            yield node
            if isinstance(node, ast.Try | ast.If):
                yield from flatten(node.body)

    return [*flatten(ast.parse(_source_file(module).read_text()).body)]


def _source_file(module: str) -> Path:
    """Return the source file of a module without importing it; raise FileNotFoundError if there is none."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place, *rest)
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return file
    raise FileNotFoundError(module)
