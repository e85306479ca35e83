"""Settings that differ from the recipe's: YAML files and words such as `optimizer.lr=1e-5`.

What lives here: merging and checking them. Megatron-Bridge's conversion to OmegaConf and back is used; what it would
skip with a warning is refused. What may not: where words come from (`cli.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer
    from omegaconf import DictConfig

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

    from megatron.bridge.training.utils.omegaconf_utils import apply_overrides
    from omegaconf import OmegaConf

    settings, callables = _settings(cfg)
    before = _plain(settings)
    OmegaConf.set_struct(settings, True)  # a name that is not there is an error
    after = _plain(_merged(settings, words, files))
    changed = dict(_changes("", before, after))
    for name, (old, new) in changed.items():
        _check_kind(name, old, new)
    for name, (_, new) in changed.items():
        _put_into_frozen(cfg, name, new)
    apply_overrides(cfg, _only(after, changed), callables)
    arrived = _plain(_settings(cfg)[0])
    for name, (_, new) in changed.items():
        if (found := _at(arrived, name)) != new:
            raise ValueError(f"{name} cannot be set to {new!r} so; it is {found!r}. Set it in a recipe of yours")
    return cfg


def _settings(cfg: ConfigContainer) -> tuple[DictConfig, dict[str, Any]]:
    from megatron.bridge.training.utils.omegaconf_utils import create_omegaconf_dict_config

    settings, callables = create_omegaconf_dict_config(cfg)
    if cfg.peft is not None:
        # It can be called, as functions can, and these are left out.
        fields = {field.name: getattr(cfg.peft, field.name) for field in dataclasses.fields(cfg.peft) if field.init}
        settings.peft = {name: value for name, value in fields.items() if value is None or isinstance(value, _PLAIN)}
    return settings, callables


def _plain(settings: DictConfig) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(settings, resolve=True)


def _merged(settings: DictConfig, words: Sequence[str], files: Sequence[str | Path]) -> DictConfig:
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, parse_hydra_overrides
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for file in files:
        try:
            settings = OmegaConf.merge(settings, OmegaConf.load(file))  # pyright: ignore[reportAssignmentType]
        except (OmegaConfBaseException, YAMLError) as error:
            raise ValueError(f"{file}: {error}") from error
    for word in words:
        try:
            settings = parse_hydra_overrides(settings, [word])
        except OverridesError as error:
            raise ValueError(f"{word}: {error}") from error
    return settings


def _changes(name: str, old: Any, new: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
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


def _put_into_frozen(cfg: ConfigContainer, name: str, value: Any) -> None:
    """Where a section is frozen, it is made anew, which Megatron-Bridge does not do."""
    *path, last = name.split(".")
    owners: list[Any] = [cfg]
    for key in path:
        owners.append(getattr(owners[-1], key))
    section = owners[-1]
    if dataclasses.is_dataclass(section) and section.__dataclass_params__.frozen:  # pyright: ignore
        setattr(owners[-2], path[-1], dataclasses.replace(section, **{last: value}))  # pyright: ignore


def _at(settings: dict, name: str) -> Any:
    for key in name.split("."):
        settings = settings[key]
    return settings


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
