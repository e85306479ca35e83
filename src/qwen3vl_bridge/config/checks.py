"""Types and functions to write checks of settings as tables, and `run_checks` to run a table.

The tables are in `config/model_validation.py` and `training/run_validation.py`. A table is a tuple of checks. Most
checks have the form `Requires("setting", value, when=condition, why="reason")`. For constraints between several
settings, a check is a function that takes all settings and raises ValueError.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass
from enum import Enum
from functools import reduce
from typing import Any

from qwen3vl_bridge.config.other_trainers import target_setting
from qwen3vl_bridge.lazy import is_installed
from qwen3vl_bridge.upstream.config_classes import own_class

logger = logging.getLogger(__name__)

Check = Callable[[Any], Any]

# Stands for the default value in the setting's class, as the expected value of a check.
DEFAULT = object()
IGNORED = "it would be ignored"


def run_checks(checks: Iterable[Check], settings: Any) -> None:
    """Run checks in order on `settings`, which is a provider or the configuration of a run.

    Raises:
        ValueError: a check has failed. The message gives the value found, the value expected and the reason.
    """
    for check in checks:
        check(settings)


@dataclass(frozen=True)
class Condition:
    """A condition on settings. Call it with all settings, such as a provider, to find out whether it is met."""

    names: str  # the settings that the condition reads, separated by spaces; listed in messages
    is_met: Callable[[Any], Any]

    def __call__(self, settings: Any) -> Any:
        """Return a true value if the condition is met."""
        return self.is_met(settings)

    def __and__(self, other: Callable[[Any], Any]) -> Condition:
        """Return a condition that is met if this condition and `other` are met.

        Messages mention the settings of `other` only if it is a `Condition`.
        """
        names = f"{self.names} {other.names}" if isinstance(other, Condition) else self.names
        return Condition(names, lambda settings: self(settings) and other(settings))

    def describe(self, settings: Any) -> str:
        """Return the names and values of the condition's settings for a message, such as " with a 1 and b 'c'"."""
        values = {name: _read(settings, name) for name in self.names.split()}
        words = [name if value is True else f"{name} {_format(value)}" for name, value in values.items()]
        return f" with {' and '.join(words)}"


def is_on(name: str) -> Condition:
    """Return a condition that is met if the setting `name` is True or has a nonzero, nonempty value."""
    return Condition(name, lambda settings: _read(settings, name))


def is_off(name: str) -> Condition:
    """Return a condition that is met if the setting `name` is False, 0, None, "" or "none"."""
    return Condition(name, lambda settings: _read(settings, name) in (None, False, "", "none"))


def is_above(name: str, number: int) -> Condition:
    """Return a condition that is met if the setting `name` is greater than `number`; None is treated as 0."""
    return Condition(name, lambda settings: (_read(settings, name) or 0) > number)


def equals(name: str, value: Any) -> Condition:
    """Return a condition that is met if the setting `name` equals `value`."""
    return Condition(name, lambda settings: _read(settings, name) == value)


def differs(name: str, value: Any) -> Condition:
    """Return a condition that is met if the setting `name` does not equal `value`."""
    return Condition(name, lambda settings: _read(settings, name) != value)


def not_installed(package: str) -> Callable[[Any], bool]:
    """Return a condition that is met if `package` is not installed. Messages do not mention this condition."""
    return lambda _: not is_installed(package)


@dataclass(frozen=True)
class Values:
    """The allowed values of a setting, with a description for error messages."""

    contains: Callable[[Any, Any], bool]  # (value, all settings) -> True if the value is allowed
    describe: Callable[[Any], str]  # all settings -> the allowed values in words


def one_of(*values: Any) -> Values:
    """Return `Values` that allow each of `values`, and lists of them."""
    *words, last = map(_format, values)
    return Values(
        lambda value, _: all(entry in values for entry in (value if isinstance(value, list) else [value])),
        lambda _: f"{', '.join(words)} or {last}",
    )


def at_least(least: int | str) -> Values:
    """Return `Values` that allow numbers not below `least`, which is a number or the name of a setting."""

    def lowest(settings: Any) -> int:
        return _read(settings, least) if isinstance(least, str) else least

    return Values(
        lambda value, settings: value is not None and value >= lowest(settings),
        lambda settings: f"{least}, {lowest(settings)}, or more" if isinstance(least, str) else f"{least} or more",
    )


def same_as(other: str) -> Values:
    """Return `Values` that allow only the value of the setting `other`."""
    return Values(
        lambda value, settings: value == _read(settings, other),
        lambda settings: f"{other}, {_format(_read(settings, other))}",
    )


def multiple_of(divisor: str) -> Values:
    """Return `Values` that allow multiples of the setting `divisor`, or of a product of settings such as "a * b".

    A divisor with the value None is treated as 1.
    """

    def sizes(settings: Any) -> dict[str, int]:
        values = {name: _read(settings, name) for name in divisor.split(" * ")}
        return {name: size for name, size in values.items() if size is not None}

    return Values(
        lambda value, settings: value % math.prod(sizes(settings).values()) == 0,
        lambda settings: f"a multiple of {' * '.join(sizes(settings))}, {math.prod(sizes(settings).values())}",
    )


@dataclass(frozen=True)
class Requires:
    """A check that a setting has the expected value. Call it with all settings to run the check."""

    name: str  # a path such as "dist_train.vision_world_size", or a product of settings such as "a * b"
    expected: Any  # the only allowed value, or `Values`, or `DEFAULT`
    # The check applies only if this condition is met; None: always. Messages describe a `Condition`.
    when: Condition | Callable[[Any], Any] | None = None
    also: tuple[Any, ...] = ()  # further accepted values with the same meaning
    why: str = ""  # the reason, or what to do instead
    # If the expected value is None, False, 0, "" or empty, accept all of these, because callers set 0.0 where
    # megatron-core has None. Only for settings that no code reads; for others, 0.0 differs from None.
    any_off: bool = False

    def __call__(self, settings: Any) -> None:
        """Raise ValueError if `when` is met and the setting does not have the expected value."""
        if self.when is not None and not self.when(settings):
            return
        wanted = self.expected
        if wanted is DEFAULT:
            section, _, name = self.name.rpartition(".")
            field = declared_fields(_read(settings, section)).get(name)
            if field is None:
                # Some supported releases lack the setting, and no code of theirs reads it.
                # tests/upstream/test_checked_settings.py lists these settings and checks that all others exist.
                return
            wanted = field.default if field.default_factory is MISSING else field.default_factory()
        value = _read(settings, self.name)
        if self.any_off and not wanted and not value:
            return
        if value in self.also or (wanted.contains(value, settings) if isinstance(wanted, Values) else value == wanted):
            return
        expected = wanted.describe(settings) if isinstance(wanted, Values) else _format(wanted)
        condition = self.when.describe(settings) if isinstance(self.when, Condition) else ""
        why = f": {self.why}" if self.why else ""
        raise ValueError(f"{self.name} is {_format(value)}{condition}, expected {expected}{why}")


def requires_default(
    names: str,
    why: str,
    when: Condition | Callable[[Any], Any] | None = None,
    *,
    section: str = "",
    also: tuple[Any, ...] = (),
    any_off: bool = False,
) -> tuple[Requires, ...]:
    """Return checks that settings have their default values.

    Args:
        names: the settings, separated by spaces.
        why: the reason, for the message.
        when: condition under which the checks apply; None: always.
        section: prefix of each name, such as "dist_train."; "" for none.
        also: further accepted values.
        any_off: if the default is None, False, 0, "" or empty, accept all of these.
    """
    return tuple(Requires(section + name, DEFAULT, when, also, why, any_off) for name in names.split())


def requires_default_while_off(names_by_switch: Mapping[str, str]) -> tuple[Requires, ...]:
    """Return checks that settings keep their defaults while the switch that enables them is off.

    A switch is a setting, such as "cpu_offloading".

    Args:
        names_by_switch: name of a switch -> names of the settings that it enables, separated by spaces. They are in
            the section of the switch.
    """
    return tuple(
        row
        for switch, names in names_by_switch.items()
        for row in requires_default(
            names, IGNORED, is_off(switch), section="".join(switch.rpartition(".")[:2]), also=(None,), any_off=True
        )
    )


def declared_fields(settings: Any) -> dict[str, Field]:
    """Return the dataclass fields of a section of settings, by name.

    ModelOpt's distillation gives the provider of a student another class. For it, return the fields of the original
    class.
    """
    return getattr(own_class(settings), "__dataclass_fields__", {})


def undeclared_names(settings: Any) -> list[str]:
    """Return the public attributes that the dataclass of an instance does not declare, such as misspelled names."""
    declared = declared_fields(settings).keys() | dir(type(settings))
    return [name for name in vars(settings) if name not in declared and not name.startswith("_")]


# Attributes that callers set on a provider although they are not fields.
_CALLER_ATTRIBUTES = frozenset(
    {"pretrained_model_name", "swiglu", "bridge", "grid", "world_size", "rank_offset"}
    | {"teacher", "kd_config", "distill_submodule", "full_model"}  # of Megatron-Bridge's `DistillationProvider`
)
# A name that resembles a field at least this much is taken for a misspelled field. The threshold is high, because
# Megatron-Bridge's recipes set some unrelated names.
_MISSPELLED = 0.85
_FREEZE = ("freeze_language_model", "freeze_vision_model", "freeze_vision_projection")


def check_provider_names(provider: Any) -> None:
    """Raise ValueError if an attribute of a provider looks like a misspelled setting; warn of other unknown attributes.

    An attribute is unknown if the dataclass does not declare it. It looks misspelled if its name resembles a field, is
    another trainer's name of a field, or begins with "freeze_". Ignore attributes that are None or False, and
    attributes that callers are known to set.
    """
    fields, kind = [*declared_fields(provider)], type(provider).__name__
    for name in undeclared_names(provider):
        if name in _CALLER_ATTRIBUTES or getattr(provider, name) in (None, False):
            continue
        target = (target_setting(name) or "").rpartition(".")[2]
        meant = [target] if target in fields else difflib.get_close_matches(name, fields, n=1, cutoff=_MISSPELLED)
        if meant := meant or (_FREEZE if name.startswith("freeze_") else ()):
            raise ValueError(f"{name} is set, but {kind} has no such setting: use {' or '.join(meant)}")
        logger.warning("%s is set, but %s has no such setting: it has no effect", name, kind)


def _read(settings: Any, name: str) -> Any:
    """Return the value of a setting "section.name" or of a product "a * b". If the name is "", return `settings`."""
    if " * " in name:
        return math.prod(_read(settings, factor) for factor in name.split(" * "))
    return reduce(getattr, name.split("."), settings) if name else settings


def _format(value: Any) -> str:
    return value.name if isinstance(value, Enum) else repr(value)
