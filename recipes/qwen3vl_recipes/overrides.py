"""Settings that differ from the recipe's: YAML files and command-line words such as `optimizer.lr=1e-5`."""

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

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer
    from omegaconf import DictConfig

_PLAIN = (bool, int, float, str, list, tuple)
_DECAY = ("optimizer.weight_decay", "scheduler.start_weight_decay", "scheduler.end_weight_decay")
_WARMUP = {f"scheduler.lr_warmup_{unit}" for unit in ("iters", "samples", "fraction")}
_ALIKE = {float: (float, int), list: (list, tuple), tuple: (list, tuple)}


def apply(cfg: ConfigContainer, words: Sequence[str] = (), files: Sequence[str | Path] = ()) -> ConfigContainer:
    """Change a configuration in place: YAML files in their order, then words in Hydra's syntax.

    Raises:
        ValueError: a setting that does not exist, or a value of another type than the recipe's.
        OSError: a file that cannot be read.
    """
    import qwen3vl_bridge  # noqa: F401  before Megatron

    from megatron.bridge.training.utils.omegaconf_utils import apply_overrides
    from omegaconf import OmegaConf

    settings, callables = _settings(cfg)
    before = _flat(settings)
    OmegaConf.set_struct(settings, True)  # unknown names are errors
    merged, asked = _merged(settings, words, files)
    after = _flat(merged)
    steps, epochs = "train.train_iters", "train.num_epochs"
    if after.get(epochs) is not None and before.get(epochs) is None and after.get(steps) == before.get(steps):
        after[steps] = None  # the recipe's, which nobody has asked for
    if (decay := after.get(_DECAY[0])) != before.get(_DECAY[0]):
        for name in _DECAY[1:]:  # of the schedule, which would replace the optimizer's
            if name not in asked and before.get(name) == after.get(name) == before[_DECAY[0]]:
                after[name] = decay
    changed = {
        name: new
        for name, new in after.items()
        if name not in before or before[name] != new or type(before[name]) is not type(new)
    }
    nested: dict = {}  # without other settings, because some do not survive the conversion
    for name, new in changed.items():
        is_section = any(other.startswith(f"{name}.") for other in before)
        _check_kind(name, {} if is_section else before.get(name), new, _hint(cfg, name))
        _put_into_frozen(cfg, name, new)
        *path, last = name.split(".")
        functools.reduce(lambda section, key: section.setdefault(key, {}), path, nested)[last] = new
    if not asked & _WARMUP:
        vars(cfg.scheduler)["_is_the_recipes"] = True  # which training/run_refusals.py may shorten
    kept = {name: value for name, value in callables.items() if name.removeprefix("root.") not in changed}
    apply_overrides(cfg, nested, kept)
    arrived = _flat(_settings(cfg)[0])
    for name, new in changed.items():
        if (found := arrived.get(name)) != new:
            raise ValueError(f"{name} cannot be set to {new!r} here; it is {found!r}. Set it in your own recipe")
    _check_precision(cfg, changed)
    return cfg


def _check_precision(cfg: ConfigContainer, names: Iterable[str]) -> None:
    """Refuse settings that `mixed_precision` overwrites: each of its fields, in each section that has one of that
    name.
    """
    from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES, get_mixed_precision_config

    chosen = cfg.mixed_precision
    if chosen is None:
        return
    if isinstance(chosen, str) and chosen not in MIXED_PRECISION_RECIPES:
        known = [name for name in MIXED_PRECISION_RECIPES if "-" not in name]  # those with hyphens are the same
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
                f"{name} is {found!r}, and mixed_precision sets it to {written!r}: expected that, another "
                "mixed_precision, or null for one, to set the precision of each section by itself"
            )


def _settings(cfg: ConfigContainer) -> tuple[DictConfig, dict[str, Any]]:
    from megatron.bridge.training.utils.omegaconf_utils import create_omegaconf_dict_config

    settings, callables = create_omegaconf_dict_config(cfg)
    if cfg.peft is not None:
        # Megatron-Bridge omits callable values, and this one is callable.
        fields = {field.name: getattr(cfg.peft, field.name) for field in dataclasses.fields(cfg.peft) if field.init}
        settings.peft = {name: value for name, value in fields.items() if value is None or isinstance(value, _PLAIN)}
    return settings, callables


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """All settings, as plain values, by their full names."""
    from omegaconf import DictConfig, OmegaConf

    if isinstance(settings, DictConfig):
        settings = OmegaConf.to_container(settings, resolve=True)
    if not isinstance(settings, dict) or not settings:
        return {prefix: settings}
    return {
        name: value
        for key, inner in settings.items()
        for name, value in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _merged(settings: DictConfig, words: Sequence[str], files: Sequence[str | Path]) -> tuple[DictConfig, set[str]]:
    """The settings with changes, and the full names of those that files and words set, whether or not to new values."""
    from qwen3vl_bridge.io.parsing import check_yaml
    from qwen3vl_bridge.models.rules import suggestion

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
            raise ValueError(f"{word}: settings can be changed, not added or removed; expected NAME=VALUE")
        try:
            settings = parse_hydra_overrides(settings, [word])
        except OverridesError as error:
            known = _flat(settings)
            if any(f"{other}.".startswith(f"{name}.") for other in known):
                raise ValueError(f"{word}: {error}") from error
            raise ValueError(f"there is no setting {name}{suggestion(name, known)}") from error
    return settings, asked


def _put_into_frozen(cfg: ConfigContainer, name: str, value: Any) -> None:
    """Recreate a frozen section with the changes, which Megatron-Bridge does not do."""
    *path, last = name.split(".")
    owners: list[Any] = [cfg]
    for key in path:
        owners.append(getattr(owners[-1], key))
    section = owners[-1]
    if dataclasses.is_dataclass(section) and section.__dataclass_params__.frozen:  # pyright: ignore
        setattr(owners[-2], path[-1], dataclasses.replace(section, **{last: value}))  # pyright: ignore


def _hint(cfg: ConfigContainer, name: str) -> Any:
    """Declared type of a setting's field; None if unknown."""
    *path, last = name.split(".")
    section: Any = cfg
    for key in path:
        section = section.get(key) if isinstance(section, dict) else getattr(section, key, None)
    try:
        return typing.get_type_hints(type(section)).get(last)
    except (NameError, TypeError):  # a name imported only for type checkers
        return None


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value has the declared type, as far as simple types go."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(one, value) for one in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    kinds = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}.get(hint)
    if kinds is None:
        return hint is not type(None)
    return isinstance(value, kinds) and isinstance(value, bool) == (hint is bool)


def _is_declared(hint: Any, value: Any) -> bool:
    """Whether a field is declared with several types, such as text or a list, and a value has one of them."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return is_union and any((typing.get_origin(one) or one) is type(value) for one in typing.get_args(hint))


def _check_kind(name: str, old: Any, new: Any, hint: Any) -> None:
    """Refuse text for a number and similar mistakes, which would otherwise fail much later."""
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
    raise ValueError(f"{name} is {new!r}, expected {_kind(old)} such as {old!r}")


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "settings"}
    return names.get(type(value), f"a {type(value).__name__}")
