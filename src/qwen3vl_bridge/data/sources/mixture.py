"""Several data sets as one source, each with its share.

For later steps a mixture is one source: samples are numbered data set by data set, and each is measured once, however
often it is read.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.media_access import MediaAccess, UrlCache
from qwen3vl_bridge.data.packing.row_plan import MixedOrder
from qwen3vl_bridge.data.schemas.conversations import Conversation
from qwen3vl_bridge.data.schemas.record_schemas import Columns, schema_of
from qwen3vl_bridge.data.sources.opening import HUB, ConversationSource, open_source, splits_in
from qwen3vl_bridge.io.parsing import read_yaml

logger = logging.getLogger(__name__)

_SETTING = "dataset.mixture"
# Names of files and folders that do not identify a data set.
_UNNAMING = ("train", "data", "valid", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class MixedSet:
    """One data set of a mixture."""

    path: str  # as `dataset.path`
    name: str  # in sample ids, messages and metrics; derived from the path by default
    weight: float | None = None  # its fraction of the samples, relative to the other weights
    epochs: float | None = None  # how often each sample is seen per epoch of the mixture; 0.3: each time another part
    media_root: str | Sequence[str] | None = None  # as `dataset.media_root`
    schema_adapter: str | None = None  # as `dataset.schema_adapter`
    columns: Columns = field(default_factory=Columns)  # as `dataset.columns`, {KEY: COLUMN}

    def path_of(self, split: str) -> str | None:
        """Path of the data set's conversations of a split, or None if it has none."""
        return splits_in(self.path).get(split)


def mixed_sets(
    setting: Sequence[Mapping[str, Any]] | str,
    media_root: str | Sequence[str] | None = None,
    schema_adapter: str | None = None,
    columns: Columns | None = None,
) -> tuple[MixedSet, ...]:
    """The data sets that a setting names, checked as far as possible without reading data (ValueError).

    The setting is a list with the fields of `MixedSet` for each data set, or the path of a YAML file with such a list.
    The other arguments are defaults; those of `schema_adapter` and `columns` are for sets that have neither.
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
    default = {"media_root": media_root, "schema_adapter": schema_adapter, "columns": columns or Columns()}
    sets = tuple(_set_of(f"{where}[{place}]", one, default) for place, one in enumerate(found))
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
    for name in ("weight", "epochs"):
        amount = given.get(name)
        is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if amount is not None and not (is_number and 0 < amount < math.inf):
            raise ValueError(f"{where}.{name} is {given[name]!r}, expected a number above 0")
    if given.get("weight") is not None and given.get("epochs") is not None:
        raise ValueError(
            f"{where} has weight {given['weight']} and epochs {given['epochs']}, expected one of the two: a share of "
            "the samples, or how often each is seen"
        )
    MediaAccess.of(given.get("media_root"))
    # A data set's own format replaces the default, whichever of the two settings states it.
    if {"schema_adapter", "columns"} & given.keys():
        default = {"media_root": default["media_root"]}
    settings = {**default, **given, "name": given.get("name") or _name_of(given["path"])}
    if "columns" in given:
        settings["columns"] = Columns.set_to(given["columns"], f"{where}.columns")
    schema_of(settings.get("schema_adapter"), settings.get("columns", Columns()))
    return MixedSet(**settings)


def _name_of(path: str) -> str:
    """The last part of a path that is not the name of a split."""
    if path.startswith(HUB):
        return path.removeprefix(HUB)
    place = Path(path)
    parts = [*place.parts[:-1], place.name.partition(".")[0].partition("*")[0].rstrip("-_")]
    return next((part for part in reversed(parts) if part.strip("/.") and part not in _UNNAMING), path)


def open_mixture(sets: Sequence[MixedSet], split: str, addresses: UrlCache | None = None) -> Mixture:
    """The data sets' conversations of a split. Weights and epochs apply to training; others are read as they are."""
    sets = [one for one in sets if one.path_of(split) is not None]
    sources = [
        open_source(
            str(one.path_of(split)),
            one.media_root,
            addresses=addresses,
            schema_adapter=one.schema_adapter,
            columns=one.columns,
        )
        for one in sets
    ]
    taken = None
    if split == "train":
        weights = [Fraction(str(one.weight)) for one in sets if one.weight is not None]
        if weights:  # an epoch is as long as all data sets together
            taken = [weight / sum(weights) * sum(map(len, sources)) for weight in weights]
        else:
            epochs = [Fraction(str(1 if one.epochs is None else one.epochs)) for one in sets]
            taken = [often * len(source) for often, source in zip(epochs, sources, strict=True)]
    mixture = Mixture([one.name for one in sets], sources, taken)
    logger.info("%s: %s", split, mixture.words())
    return mixture


class Mixture:
    """A `ConversationSource` of several sources, one after the other, with the order that mixes them."""

    def __init__(
        self, names: Sequence[str], sources: Sequence[ConversationSource], taken: Sequence[Fraction] | None = None
    ) -> None:
        """Mix sources by their names and the number of samples of each per epoch; None for each sample once."""
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
        """Order of the samples over epochs, for a seed; None for each data set's own order."""
        return MixedOrder(self._lengths, self._taken, seed)

    def set_of(self, index: int) -> int:
        """Index of the data set that a sample belongs to."""
        return bisect_right(self._firsts, range(len(self))[index]) - 1

    def sample_id(self, index: int) -> str:
        """Name of the data set, and the sample id of its source."""
        number = self.set_of(index)
        return f"{self.names[number]}/{self.sources[number].sample_id(range(len(self))[index] - self._firsts[number])}"

    def fingerprint(self) -> str:
        """The sources' fingerprints and samples per epoch; names and paths are not part of it."""
        sets = zip(self.sources, self._taken, strict=True)
        return " + ".join(f"{source.fingerprint()} ({taken} an epoch)" for source, taken in sets)

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation; errors are those of the data set's source, and name the data set."""
        number = self.set_of(index)
        try:
            found = self.sources[number][range(len(self))[index] - self._firsts[number]]
        except DataError as error:
            raise type(error)(f"{self.names[number]}/{error}") from error
        return replace(found, sample_id=f"{self.names[number]}/{found.sample_id}")

    def words(self) -> str:
        """Summary of an epoch's samples per data set."""
        total = sum(self._taken)
        return "; ".join(
            f"{name}: {length:,} samples, {float(taken / length):.4g} times an epoch ({float(taken / total):.1%})"
            for name, length, taken in zip(self.names, self._lengths, self._taken, strict=True)
        )
