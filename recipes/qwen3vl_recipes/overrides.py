"""Settings that differ from the recipe's: YAML files and words such as `optimizer.lr=1e-5`.

What lives here: merging and checking them. Megatron-Bridge's conversion to OmegaConf and back is used; what it would
skip with a warning is refused. What may not: where words come from (`cli.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


_PLAIN = (bool, int, float, str, list, tuple)
_ALIKE = {float: (float, int), list: (list, tuple), tuple: (list, tuple)}


def apply(cfg: ConfigContainer, words: Sequence[str] = (), files: Sequence[str | Path] = ()) -> ConfigContainer:
    """Change a configuration in place: files in their order, then words.

    Args:
        cfg: a recipe's.
        words: in Hydra's syntax.
        files: YAML, with any part of the configuration.

    Raises:
        ValueError: a setting that does not exist, or a value of another kind than the recipe's.
        OSError: a file that cannot be read.
    """
    import qwen3vl_bridge  # noqa: F401  before Megatron

    from megatron.bridge.training.utils import omegaconf_utils as bridge
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    settings, callables = bridge.create_omegaconf_dict_config(cfg)
    if cfg.peft is not None:
        # It can be called, as functions can, and these are left out.
        settings.peft = _plain_fields(cfg.peft)
    before = OmegaConf.to_container(settings, resolve=True)
    OmegaConf.set_struct(settings, True)  # a name that is not there is an error
    for file in files:
        try:
            settings = OmegaConf.merge(settings, OmegaConf.load(file))
        except (OmegaConfBaseException, YAMLError) as error:
            raise ValueError(f"{file}: {error}") from error
    if words:
        try:
            settings = bridge.parse_hydra_overrides(settings, list(words))
        except bridge.OverridesError as error:
            raise ValueError(str(error)) from error
    after = OmegaConf.to_container(settings, resolve=True)
    changed = dict(_changes("", before, after))
    for name, (old, new) in changed.items():
        _check_kind(name, old, new)
    bridge.apply_overrides(cfg, _only(after, changed), callables)
    return cfg


def _plain_fields(section: Any) -> dict[str, Any]:
    """What can be set of a dataclass, where it is a value or a list of values."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section) if field.init}
    return {name: value for name, value in values.items() if value is None or isinstance(value, _PLAIN)}


def _changes(name: str, old: Any, new: Any):
    """(name, (old, new)) of each setting that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in new:
            yield from _changes(f"{name}.{key}" if name else str(key), old.get(key), new[key])
    elif old != new or type(old) is not type(new):
        yield name, (old, new)


def _only(after: dict, changed: dict[str, Any]) -> dict:
    """The settings that differ, nested as they were: the rest is not touched, as some of it does not come back."""
    tree: dict = {}
    for name in changed:
        *path, last = name.split(".")
        source, target = after, tree
        for key in path:
            source, target = source[key], target.setdefault(key, {})
        target[last] = source[last]
    return tree


def _check_kind(name: str, old: Any, new: Any) -> None:
    """Refuses text for a number and the like, which would fail much later. What was None may become anything."""
    if old is None or new is None:
        return
    kinds = next((kinds for kind, kinds in _ALIKE.items() if isinstance(old, kind)), (type(old),))
    if isinstance(new, kinds) and isinstance(old, bool) == isinstance(new, bool):
        return
    raise ValueError(f"{name} is {new!r}, expected {_kind(old)} such as {old!r}")


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "settings"}
    return names.get(type(value), f"a {type(value).__name__}")
