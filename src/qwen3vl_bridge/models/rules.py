"""Rules of settings as rows of a table; `models/refusals.py` has the model's, `training/run_refusals.py` a run's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import reduce
from typing import Any

# A row; or a function that raises ValueError, for constraints between several settings.
Rule = Callable[[Any], None]


def check(rules: Iterable[Rule], settings: Any) -> None:
    """Check a provider or a run's configuration against a table, in its order.

    Raises:
        ValueError: the first rule that is broken: the value, what is expected and why.
    """
    for rule in rules:
        rule(settings)


@dataclass(frozen=True)
class When:
    """Conditions under which rows apply.

    Attributes:
        names: the settings on which the conditions depend, separated by spaces, for the message.
        holds: whether the conditions are met.
    """

    names: str
    holds: Callable[[Any], Any]

    def describe(self, settings: Any) -> str:
        """These settings with their values, as " with a 1 and b 'c'"; "" if none is named."""
        values = {name: _value(settings, name) for name in self.names.split()}
        words = [name if value is True else f"{name} {_shown(value)}" for name, value in values.items()]
        return f" with {' and '.join(words)}" if words else ""


@dataclass(frozen=True)
class Allowed:
    """The allowed value of a setting.

    Attributes:
        name: the path to it, as "dist_train.vision_world_size"; or a product of settings, as "a * b".
        expected: its only value, or a `Range` of values.
        why: the reason, or what to do instead.
        when: condition under which the row applies; None: always.
        also: further accepted values with the same meaning.
    """

    name: str
    expected: Any
    why: str = ""
    when: When | None = None
    also: tuple[Any, ...] = ()

    def __call__(self, settings: Any) -> None:
        """Raise ValueError if the setting has another value."""
        if self.when is not None and not self.when.holds(settings):
            return
        value, wanted = _value(settings, self.name), self.expected
        if value in self.also or (wanted.has(value, settings) if isinstance(wanted, Range) else value == wanted):
            return
        expected = wanted.describe(settings) if isinstance(wanted, Range) else _shown(wanted)
        circumstances, why = self.when.describe(settings) if self.when else "", f": {self.why}" if self.why else ""
        raise ValueError(f"{self.name} is {_shown(value)}{circumstances}, expected {expected}{why}")


@dataclass(frozen=True)
class Range:
    """Allowed values of a setting.

    Attributes:
        has: (value, all settings) -> whether it is allowed.
        describe: description of the values, from all settings.
    """

    has: Callable[[Any, Any], bool]
    describe: Callable[[Any], str]


def any_of(*values: Any) -> Range:
    """These values, or lists of some of them."""
    *words, last = map(_shown, values)
    return Range(
        lambda value, _: all(entry in values for entry in (value if isinstance(value, list) else [value])),
        lambda _: f"{', '.join(words)} or {last}",
    )


def at_least(least: int) -> Range:
    """This number and those above."""
    return Range(lambda value, _: value is not None and value >= least, lambda _: f"{least} or more")


def multiple_of(divisor: str) -> Range:
    """Multiples of a setting, or of a product, as "a * b"; None counts as 1."""

    def sizes(settings: Any) -> dict[str, int]:
        values = {name: _value(settings, name) for name in divisor.split(" * ")}
        return {name: size for name, size in values.items() if size is not None}

    return Range(
        lambda value, settings: value % math.prod(sizes(settings).values()) == 0,
        lambda settings: f"a multiple of {' * '.join(sizes(settings))}, {math.prod(sizes(settings).values())}",
    )


def under(when: When, *rows: Allowed) -> tuple[Allowed, ...]:
    """Rows that apply under the same conditions."""
    return tuple(replace(row, when=when) for row in rows)


def only(why: str, **values: Any) -> dict[str, Allowed]:
    """Rows of settings that have one value each, for one reason; by name, so that a family can replace some."""
    return {name: Allowed(name, value, why) for name, value in values.items()}


def at_default(kind: type, names: str, why: str, *, section: str = "", when: When | None = None) -> dict[str, Allowed]:
    """Rows of fields that must have their defaults, or None; by name.

    Args:
        kind: the dataclass of the fields. Those that the installed release does not have get no row.
        names: of the fields, separated by spaces.
        why: the reason.
        section: what comes before a field's name, as "checkpoint.".
        when: condition under which the rows apply.
    """
    wanted = names.split()
    return {
        field.name: Allowed(
            section + field.name,
            field.default if field.default_factory is MISSING else field.default_factory(),
            why,
            when,
            also=(None,),
        )
        for field in fields(kind)
        if field.name in wanted
    }


def _value(settings: Any, name: str) -> Any:
    if " * " in name:
        return math.prod(_value(settings, factor) for factor in name.split(" * "))
    return reduce(getattr, name.split("."), settings)


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Enum) else repr(value)
