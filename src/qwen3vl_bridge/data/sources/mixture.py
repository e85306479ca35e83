"""Several data sets as one source, each with its share.

What lives here: what a setting of a mixture means, and reading the sets as one. What may not: the order that mixes them
(`data/packing/sample_order.py`), which reader a path is for (`opening.py`).

To all that comes after it a mixture is one source: its samples are numbered one set after the other, and each is
measured once, however often it is read.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.images import MediaAccess
from qwen3vl_bridge.data.packing.sample_order import MixedOrder
from qwen3vl_bridge.data.schemas.columns import Columns, one_schema
from qwen3vl_bridge.data.schemas.conversations import Conversation
from qwen3vl_bridge.data.schemas.named_schemas import named_schema
from qwen3vl_bridge.data.sources.hub import HUB
from qwen3vl_bridge.data.sources.opening import ConversationSource, open_source
from qwen3vl_bridge.data.sources.splits import splits_in
from qwen3vl_bridge.files.parsing import read_yaml

logger = logging.getLogger(__name__)

# What a mixture's setting is called, in a configuration and in a YAML file of its own.
_SETTING = "dataset.mixture"
# Names of files and folders that say nothing of whose they are.
_UNNAMING = ("train", "data", "valid", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class MixedSet:
    """One set of a mixture, as it is set.

    Attributes:
        path: as `dataset.path`: a folder with its splits, a file, a folder of Parquet files, or one of the hub.
        name: what samples, messages and figures call it; by default after the path.
        weight: its share of the samples, beside the other sets' weights.
        epochs: how often each of its samples is seen in an epoch of the mixture; 0.3 is another part of it each epoch.
        media_root: folder of its pictures, or several (see `MediaAccess`); by default that of each file.
        schema_adapter: its records' format (see `data/schemas/named_schemas.py`); None for conversations.
        columns: its records' own names for what is read (see `data/schemas/columns.py`), as {KEY: COLUMN}.
    """

    path: str
    name: str
    weight: float | None = None
    epochs: float | None = None
    media_root: str | Sequence[str] | None = None
    schema_adapter: str | None = None
    columns: Columns = field(default_factory=Columns)

    def path_of(self, split: str) -> str | None:
        """Where the set's conversations of a split are, or None if it has none."""
        return splits_in(self.path).get(split)


def mixed_sets(
    setting: Sequence[Mapping[str, Any]] | str,
    media_root: str | Sequence[str] | None = None,
    schema_adapter: str | None = None,
    columns: Columns | None = None,
) -> tuple[MixedSet, ...]:
    """The sets that a setting names, checked as far as that goes without reading data.

    Args:
        setting: a list with the fields of `MixedSet` for each set; or the path of a YAML file with such a list.
        media_root: of sets that say none.
        schema_adapter: likewise, of sets that say neither this nor columns.
        columns: likewise.

    Raises:
        ValueError: no list of sets, a field that there is not or with a value it cannot have, sets that are called
            alike, weights for some of the sets alone, or beside epochs.
    """
    where, found = _SETTING, setting
    if isinstance(setting, (str, os.PathLike)):
        where = str(setting)
        try:
            found = read_yaml(Path(setting))
        except OSError as error:
            raise ValueError(
                f"{_SETTING} is {where!r}, which cannot be read ({error}); expected a YAML file"
            ) from error
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ValueError(f"{where} has {found!r}, expected a list of sets, such as [{{path: DATA, weight: 2}}]")
    given = {"media_root": media_root, "schema_adapter": schema_adapter, "columns": columns or Columns()}
    sets = tuple(_set_of(f"{where}[{place}]", one, given) for place, one in enumerate(found))
    names = [one.name for one in sets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{where} has {names.count(twice)} sets that are called {twice!r}; expected a `name` for each")
    if any(one.weight is not None for one in sets) and any(one.weight is None for one in sets):
        without = next(one.name for one in sets if one.weight is None)
        raise ValueError(f"{where} has weights, but none for {without}; expected `weight` for all sets, or for none")
    return sets


def _set_of(where: str, given: Any, default: Mapping[str, Any]) -> MixedSet:
    keys = [field.name for field in fields(MixedSet)]
    if not isinstance(given, Mapping) or not isinstance(given.get("path"), str) or not given["path"]:
        raise ValueError(f"{where} is {given!r}, expected a `path`, and optionally any of {', '.join(keys[1:])}")
    if unknown := [key for key in given if key not in keys]:
        raise ValueError(f"{where} has {unknown[0]!r}, which is no setting of a set; expected any of {', '.join(keys)}")
    for name in ("name", "schema_adapter"):
        if not isinstance(given.get(name), (str, type(None))) or given.get(name) == "":
            raise ValueError(f"{where}.{name} is {given[name]!r}, expected text")
    for name in ("weight", "epochs"):
        if not _is_amount(given.get(name)):
            raise ValueError(f"{where}.{name} is {given[name]!r}, expected a number above 0")
    if given.get("weight") is not None and given.get("epochs") is not None:
        raise ValueError(
            f"{where} has weight {given['weight']} and epochs {given['epochs']}, expected one of the two: a share of "
            "the samples, or how often each is seen"
        )
    MediaAccess.of(given.get("media_root"))
    own = {**given, "columns": Columns.set_to(given["columns"], f"{where}.columns")} if "columns" in given else given
    # A set's own format takes the place of the others', by whichever of both it is said.
    format_of = own if {"schema_adapter", "columns"} & own.keys() else default
    settings = {"media_root": default["media_root"], **own}
    settings |= {key: format_of[key] for key in ("schema_adapter", "columns") if key in format_of}
    one_schema(named_schema(settings.get("schema_adapter")), settings.get("columns"))
    return MixedSet(**{**settings, "name": given.get("name") or _name_of(given["path"])})


def _is_amount(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _name_of(path: str) -> str:
    """The last part of a path that is not the name of a split."""
    if path.startswith(HUB):
        return path.removeprefix(HUB)
    place = Path(path)
    parts = [*place.parts[:-1], place.name.partition(".")[0].partition("*")[0].rstrip("-_")]
    return next((part for part in reversed(parts) if part.strip("/.") and part not in _UNNAMING), path)


def open_mixture(sets: Sequence[MixedSet], split: str, addresses: Callable[[str, str], Path] | None = None) -> Mixture:
    """The sets' conversations of a split. Weights and epochs are of training; other splits are read as they are.

    Args:
        sets: of them, those that have the split.
        split: "train", "valid" or "test".
        addresses: gives the files of addresses, as `open_source` takes it.

    Raises:
        DataError: a path that is not there or cannot be read, or has no conversations.
        ValueError: shares so small that an epoch would have no sample.
    """
    places = [(one, path) for one in sets if (path := one.path_of(split)) is not None]
    sources = [
        open_source(path, one.media_root, addresses=addresses, schema_adapter=one.schema_adapter, columns=one.columns)
        for one, path in places
    ]
    chosen = [one for one, _ in places]
    mixture = Mixture([one.name for one in chosen], sources, _taken(chosen, sources) if split == "train" else None)
    logger.info("%s: %s", split, mixture.words())
    return mixture


def _taken(sets: Sequence[MixedSet], sources: Sequence[ConversationSource]) -> list[Fraction]:
    """How many samples of each set an epoch takes. Under weights, an epoch is as long as all sets together."""
    weights = [Fraction(str(one.weight)) for one in sets if one.weight is not None]
    if weights:
        return [weight / sum(weights) * sum(map(len, sources)) for weight in weights]
    epochs = [Fraction(str(1 if one.epochs is None else one.epochs)) for one in sets]
    return [often * len(source) for often, source in zip(epochs, sources, strict=True)]


class Mixture:
    """A `ConversationSource` of several, one after the other, that knows the order which mixes them."""

    def __init__(
        self, names: Sequence[str], sources: Sequence[ConversationSource], taken: Sequence[Fraction] | None = None
    ) -> None:
        """Mix sources.

        Args:
            names: of the sets.
            sources: their conversations.
            taken: how many samples of each an epoch takes; None for each sample once.

        Raises:
            DataError: a set without conversations.
            ValueError: as `MixedOrder`.
        """
        self.names, self.sources = tuple(names), tuple(sources)
        lengths = tuple(map(len, sources))
        for name, length in zip(names, lengths, strict=True):
            if not length:
                raise DataError(name, "found no conversations, expected at least one in each set of a mixture")
        self._taken = tuple(map(Fraction, lengths)) if taken is None else tuple(taken)
        self._lengths, self._firsts = lengths, [0, *accumulate(lengths)]
        self.order(None)  # refuses what cannot be mixed

    def __len__(self) -> int:
        return self._firsts[-1]

    def order(self, seed: int | None) -> MixedOrder:
        """In which epochs read the samples, by a seed; None for each set's own order."""
        return MixedOrder(self._lengths, self._taken, seed)

    def set_of(self, index: int) -> int:
        """Which set, counted from 0, a sample is of."""
        return bisect_right(self._firsts, range(len(self))[index]) - 1

    def sample_id(self, index: int) -> str:
        """The set, and what the set's source says."""
        number = self.set_of(index)
        return f"{self.names[number]}/{self.sources[number].sample_id(range(len(self))[index] - self._firsts[number])}"

    def fingerprint(self) -> str:
        """Of each set what its source says, and how many samples an epoch takes; its name and place may change."""
        sets = zip(self.sources, self._taken, strict=True)
        return " + ".join(f"{source.fingerprint()} ({taken} an epoch)" for source, taken in sets)

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation.

        Raises:
            DataError: as the set's source; the message names the set.
        """
        number = self.set_of(index)
        try:
            found = self.sources[number][range(len(self))[index] - self._firsts[number]]
        except DataError as error:
            raise type(error)(f"{self.names[number]}/{error}") from error
        return replace(found, sample_id=f"{self.names[number]}/{found.sample_id}")

    def words(self) -> str:
        """What an epoch has of each set."""
        total = sum(self._taken)
        return "; ".join(
            f"{name}: {length:,} samples, {float(taken / length):.4g} times an epoch ({float(taken / total):.1%})"
            for name, length, taken in zip(self.names, self._lengths, self._taken, strict=True)
        )
