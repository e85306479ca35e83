"""Override settings of a recipe with YAML files and arguments such as `optimizer.lr=1e-5`."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_recipes.setting_names import flatten_settings

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer
    from omegaconf import DictConfig, ListConfig

_PLAIN = (bool, int, float, str, list, tuple)
_DECAY = ("optimizer.weight_decay", "scheduler.start_weight_decay", "scheduler.end_weight_decay")
_WARMUP = {f"scheduler.lr_warmup_{unit}" for unit in ("iters", "samples", "fraction")}
_ALIKE = {float: (float, int), list: (list, tuple), tuple: (list, tuple)}


def apply(cfg: ConfigContainer, words: Sequence[str] = (), files: Sequence[str | Path] = ()) -> ConfigContainer:
    """Apply settings from files and arguments to a configuration, in place, and return it.

    Args:
        cfg: configuration of a recipe.
        words: settings in Hydra's syntax, which are applied last.
        files: YAML files, in the order in which they are applied.

    Raises:
        ValueError: a setting does not exist, or a value has the wrong type.
        OSError: a file cannot be read.
    """
    import qwen3vl_bridge  # noqa: F401  before Megatron

    from megatron.bridge.training.utils.omegaconf_utils import apply_overrides
    from omegaconf import OmegaConf

    settings, callables = _settings(cfg)
    before = _flat(settings)
    OmegaConf.set_struct(settings, True)  # raises an error for unknown names
    merged, asked = _merge(settings, words, files)
    after = _flat(merged)
    steps, epochs = "train.train_iters", "train.num_epochs"
    if after.get(epochs) is not None and before.get(epochs) is None and after.get(steps) == before.get(steps):
        after[steps] = None  # num_epochs replaces the recipe's number of steps
    if (decay := after.get(_DECAY[0])) != before.get(_DECAY[0]):
        for name in _DECAY[1:]:  # otherwise the schedule would overwrite the optimizer's value
            if name not in asked and before.get(name) == after.get(name) == before[_DECAY[0]]:
                after[name] = decay
    changed = {
        name: new
        for name, new in after.items()
        if name not in before or before[name] != new or type(before[name]) is not type(new)
    }
    nested: dict = {}  # only changed settings, because `apply_overrides` alters some others
    for name, new in changed.items():
        is_section = any(other.startswith(f"{name}.") for other in before)
        _check_type(name, {} if is_section else before.get(name), new, _declared_type(cfg, name))
        _set_in_frozen_section(cfg, name, new)
        *path, last = name.split(".")
        functools.reduce(lambda section, key: section.setdefault(key, {}), path, nested)[last] = new
    if not asked & _WARMUP:
        vars(cfg)["has_recipes_warmup"] = True  # see `Qwen3VLConfigContainer`
    kept = {name: value for name, value in callables.items() if name.removeprefix("root.") not in changed}
    apply_overrides(cfg, nested, kept)
    arrived = _flat(_settings(cfg)[0])
    for name, new in changed.items():
        if (found := arrived.get(name)) != new:
            raise ValueError(
                f"{name} cannot be set to {new!r} with an argument or --config, and stays {found!r}: set it in your "
                "own recipe"
            )
    _check_precision(cfg, changed)
    return cfg


def _check_precision(cfg: ConfigContainer, names: Iterable[str]) -> None:
    """Raise ValueError if `mixed_precision` would overwrite one of the named settings with another value."""
    from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES, get_mixed_precision_config

    chosen = cfg.mixed_precision
    if chosen is None:
        return
    if isinstance(chosen, str) and chosen not in MIXED_PRECISION_RECIPES:
        known = [name for name in MIXED_PRECISION_RECIPES if "-" not in name]  # names with hyphens are aliases
        close = difflib.get_close_matches(chosen, known, n=1, cutoff=0.4) or known
        raise ValueError(f"mixed_precision is {chosen!r}, expected null or a name such as {', '.join(close)}")
    mixed = get_mixed_precision_config(chosen) if isinstance(chosen, str) else copy.copy(chosen)
    mixed.finalize()
    for name in names:
        section, _, field = name.rpartition(".")
        if section not in ("model", "optimizer", "ddp") or not hasattr(mixed, field):
            continue
        found, written = getattr(getattr(cfg, section), field), getattr(mixed, field)
        if found != written:
            raise ValueError(
                f"{name} is {found!r}, but mixed_precision sets it to {written!r}: use this value or another "
                "mixed_precision, or set mixed_precision=null to set the precision of each section separately"
            )


def _settings(cfg: ConfigContainer) -> tuple[DictConfig, dict[str, Any]]:
    from megatron.bridge.training.utils.omegaconf_utils import create_omegaconf_dict_config

    settings, callables = create_omegaconf_dict_config(cfg)
    if cfg.peft is not None:
        # Megatron-Bridge omits callable values, and a `peft` object is callable.
        fields = {field.name: getattr(cfg.peft, field.name) for field in dataclasses.fields(cfg.peft) if field.init}
        settings.peft = {name: value for name, value in fields.items() if value is None or isinstance(value, _PLAIN)}
    return settings, callables


def _flat(settings: DictConfig | ListConfig) -> dict[str, Any]:
    """Return all settings as plain values by their full names, such as "optimizer.lr"."""
    from omegaconf import OmegaConf

    return flatten_settings(OmegaConf.to_container(settings, resolve=True))


def _merge(settings: DictConfig, words: Sequence[str], files: Sequence[str | Path]) -> tuple[DictConfig, set[str]]:
    """Return the settings after all changes, and the full names of all settings that `files` and `words` contain."""
    from qwen3vl_bridge.config.other_trainers import suggest_settings
    from qwen3vl_bridge.core.files import check_yaml

    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, parse_hydra_overrides
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    asked = {word.partition("=")[0] for word in words}
    for file in files:
        check_yaml(Path(file))
        try:
            loaded = OmegaConf.load(file)
            settings = OmegaConf.merge(settings, loaded)  # pyright: ignore[reportAssignmentType]
            asked |= _flat(loaded).keys()
        except (OmegaConfBaseException, YAMLError) as error:
            raise ValueError(f"{file}: {error}") from error
    for word in words:
        name = word.partition("=")[0]
        if name[:1] in ("+", "~"):
            raise ValueError(f"{word}: settings can be changed, not added or removed; write NAME=VALUE")
        try:
            settings = parse_hydra_overrides(settings, [word])
        except OverridesError as error:
            known = _flat(settings)
            if any(f"{other}.".startswith(f"{name}.") for other in known):
                raise ValueError(f"{word}: {error}") from error
            raise ValueError(f"there is no setting {name}{suggest_settings(name, known)}") from error
    return settings, asked


def _set_in_frozen_section(cfg: ConfigContainer, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass, by replacing the dataclass by a changed copy.

    Do nothing if the section of the setting `name` is no frozen dataclass.
    """
    *path, last = name.split(".")
    owners: list[Any] = [cfg]
    for key in path:
        owners.append(getattr(owners[-1], key))
    section = owners[-1]
    if dataclasses.is_dataclass(section) and section.__dataclass_params__.frozen:  # pyright: ignore
        setattr(owners[-2], path[-1], dataclasses.replace(section, **{last: value}))  # pyright: ignore


def _declared_type(cfg: ConfigContainer, name: str) -> Any:
    """Return the type that a dataclass declares for the setting; None if unknown."""
    *path, last = name.split(".")
    section: Any = cfg
    for key in path:
        section = section.get(key) if isinstance(section, dict) else getattr(section, key, None)
    try:
        return typing.get_type_hints(type(section)).get(last)
    except (NameError, TypeError):  # a name imported only for type checkers
        return None


def _fits(hint: Any, value: Any) -> bool:
    """Return True if a value has the declared type `hint`, or if `hint` is not a simple type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(one, value) for one in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    kinds = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}.get(hint)
    if kinds is None:
        return hint is not type(None)
    return isinstance(value, kinds) and isinstance(value, bool) == (hint is bool)


def _is_declared(hint: Any, value: Any) -> bool:
    """Return True if the declared type `hint` of a setting is a union that includes the type of the value."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return is_union and any((typing.get_origin(one) or one) is type(value) for one in typing.get_args(hint))


def _check_type(name: str, old: Any, new: Any, hint: Any) -> None:
    """Raise ValueError if the value `new` of a setting has the wrong type, such as text for a number.

    `old` is the recipe's value, and `hint` the type that the setting's class declares.
    """
    if new is None:
        return
    if old is None:
        if hint is not None and not _fits(hint, new):
            raise ValueError(f"{name} is {new!r}, expected {hint}")
        return
    kinds = next((kinds for kind, kinds in _ALIKE.items() if isinstance(old, kind)), (type(old),))
    if isinstance(new, kinds) and isinstance(old, bool) == isinstance(new, bool):
        return
    if _is_declared(hint, new):
        return
    raise ValueError(f"{name} is {new!r}, expected {_describe_type(old)} such as {old!r}")


def _describe_type(value: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "settings"}
    return names.get(type(value), f"a {type(value).__name__}")
