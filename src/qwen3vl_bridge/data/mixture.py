"""Combine several data sets into one source, each with its share.

For later steps a mixture is one source: samples are numbered data set by data set, and each sample is measured once,
however often it is read.
"""

from __future__ import annotations

import functools
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

from qwen3vl_bridge.core.files import read_yaml
from qwen3vl_bridge.data.conversations import Columns, Conversation, find_schema
from qwen3vl_bridge.data.data_paths import HUB, splits_in
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media import MediaAccess, UrlCache
from qwen3vl_bridge.data.packing import MixedOrder
from qwen3vl_bridge.data.sources import ConversationSource, open_source

logger = logging.getLogger(__name__)

_SETTING = "dataset.mixture"
# Names of files and folders that do not identify a data set.
_GENERIC_NAMES = ("train", "data", "valid", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class MixedSet:
    """One data set of a mixture."""

    path: str  # as `dataset.path`
    name: str  # name in sample ids, messages and metrics; derived from the path by default
    weight: float | None = None  # fraction of the samples, relative to the other weights
    # how often each sample is seen per epoch of the mixture; with 0.3, each epoch reads another part
    epochs: float | None = None
    media_root: str | Sequence[str] | None = None  # as `dataset.media_root`
    schema_adapter: str | None = None  # as `dataset.schema_adapter`
    columns: Columns = field(default_factory=Columns)  # as `dataset.columns`, {KEY: COLUMN}

    def path_of(self, split: str) -> str | None:
        """Return the path of a split of the data set; None if it has no such split."""
        return splits_in(self.path).get(split)


def read_mixture(
    setting: Sequence[Mapping[str, Any]] | str,
    media_root: str | Sequence[str] | None = None,
    schema_adapter: str | None = None,
    columns: Columns | None = None,
) -> tuple[MixedSet, ...]:
    """Return the data sets of a mixture setting; raise ValueError if it is invalid, without reading data.

    The setting is a list with the fields of `MixedSet` for each data set, or the path of a YAML file with such a list.
    The other arguments are defaults. A data set that sets `schema_adapter` or `columns` uses neither of these defaults.
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
        raise ValueError(f"{where} has {found!r}, expected a list of data sets, such as [{{path: DATA, weight: 2}}]")
    default = {"media_root": media_root, "schema_adapter": schema_adapter, "columns": columns or Columns()}
    sets = tuple(_read_set(f"{where}[{place}]", one, default) for place, one in enumerate(found))
    names = [one.name for one in sets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{where} has {names.count(twice)} data sets with the name {twice!r}; set a `name` for each")
    if any(one.weight is not None for one in sets) and any(one.weight is None for one in sets):
        without = next(one.name for one in sets if one.weight is None)
        raise ValueError(
            f"{where} sets `weight` for some data sets, but not for {without}; set it for all data sets, or for none"
        )
    return sets


def _read_set(where: str, given: Any, default: Mapping[str, Any]) -> MixedSet:
    keys = [field.name for field in fields(MixedSet)]
    if not isinstance(given, Mapping) or not isinstance(given.get("path"), str) or not given["path"]:
        raise ValueError(f"{where} is {given!r}, expected a `path`, and optionally any of {', '.join(keys[1:])}")
    if unknown := [key for key in given if key not in keys]:
        raise ValueError(
            f"{where} has {unknown[0]!r}, which is not a setting of a data set; expected any of {', '.join(keys)}"
        )
    for name in ("weight", "epochs"):
        amount = given.get(name)
        is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if amount is not None and not (is_number and 0 < amount < math.inf):
            raise ValueError(f"{where}.{name} is {given[name]!r}, expected a number above 0")
    if given.get("weight") is not None and given.get("epochs") is not None:
        raise ValueError(
            f"{where} sets both weight {given['weight']} and epochs {given['epochs']}; set only `weight`, a share of "
            "the samples, or only `epochs`, how often each sample is seen"
        )
    MediaAccess.from_settings(given.get("media_root"))
    # A data set's own format replaces the default, whichever of the two settings it uses.
    if {"schema_adapter", "columns"} & given.keys():
        default = {"media_root": default["media_root"]}
    settings = {**default, **given, "name": given.get("name") or _default_name(given["path"])}
    if "columns" in given:
        settings["columns"] = Columns.from_mapping(given["columns"], f"{where}.columns")
    find_schema(settings.get("schema_adapter"), settings.get("columns", Columns()))
    return MixedSet(**settings)


def _default_name(path: str) -> str:
    """Return a name for a data set: the last component of its path, except generic names such as "train" and "data"."""
    if path.startswith(HUB):
        return path.removeprefix(HUB)
    place = Path(path)
    parts = [*place.parts[:-1], place.name.partition(".")[0].partition("*")[0].rstrip("-_")]
    return next((part for part in reversed(parts) if part.strip("/.") and part not in _GENERIC_NAMES), path)


def open_mixture(sets: Sequence[MixedSet], split: str, url_cache: UrlCache | None = None) -> Mixture:
    """Open one split of several data sets as a mixture. Weights and epochs apply only to the split "train"."""
    sets = [one for one in sets if one.path_of(split) is not None]
    sources = [
        open_source(
            str(one.path_of(split)),
            one.media_root,
            url_cache=url_cache,
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
    _log_once(f"{split}: {mixture.summary()}")
    return mixture


@functools.cache
def _log_once(message: str) -> None:
    """Log a message once per process, because the checks before a run open the same data several times."""
    logger.info("%s", message)


class Mixture:
    """Several data sets as one `ConversationSource`, with the order that mixes their samples."""

    def __init__(
        self, names: Sequence[str], sources: Sequence[ConversationSource], taken: Sequence[Fraction] | None = None
    ) -> None:
        """Mix named sources; raise DataError if a source has no conversations.

        `taken` is the number of samples per epoch of each source; None to read each sample once per epoch.
        """
        self.names, self.sources = tuple(names), tuple(sources)
        lengths = tuple(map(len, sources))
        for name, length in zip(names, lengths, strict=True):
            if not length:
                raise DataError(name, "found no conversations, expected at least one in each data set of a mixture")
        self._taken = tuple(map(Fraction, lengths)) if taken is None else tuple(taken)
        self._lengths, self._firsts = lengths, [0, *accumulate(lengths)]
        self.order(None)  # raises ValueError if the sources cannot be mixed

    def __len__(self) -> int:
        return self._firsts[-1]

    def order(self, seed: int | None) -> MixedOrder:
        """Return the order in which samples are read, over all epochs. The order is not shuffled if `seed` is None."""
        return MixedOrder(self._lengths, self._taken, seed)

    def set_index(self, index: int) -> int:
        """Return the index of the data set that contains a sample."""
        return bisect_right(self._firsts, range(len(self))[index]) - 1

    def sample_id(self, index: int) -> str:
        """Return "NAME/ID": the name of the data set, and the sample id in this data set."""
        number = self.set_index(index)
        return f"{self.names[number]}/{self.sources[number].sample_id(range(len(self))[index] - self._firsts[number])}"

    def fingerprint(self) -> str:
        """Return a text that identifies the data: the fingerprint and samples per epoch of each data set."""
        sets = zip(self.sources, self._taken, strict=True)
        return " + ".join(f"{source.fingerprint()} ({taken} an epoch)" for source, taken in sets)

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation. Put the name of its data set in front of its sample id, or of a DataError."""
        number = self.set_index(index)
        try:
            found = self.sources[number][range(len(self))[index] - self._firsts[number]]
        except DataError as error:
            raise type(error)(f"{self.names[number]}/{error}") from error
        return replace(found, sample_id=f"{self.names[number]}/{found.sample_id}")

    def summary(self) -> str:
        """Return a line of text with the size of each data set, and its share of an epoch."""
        total = sum(self._taken)
        return "; ".join(
            f"{name}: {length:,} samples, {float(taken / length):.4g} times an epoch ({float(taken / total):.1%})"
            for name, length, taken in zip(self.names, self._lengths, self._taken, strict=True)
        )
