"""Conversations in streaming data sets of Hugging Face's `datasets`, which know neither their length nor their rows.

What lives here: reading forward, what is kept of it, and numbers for what was read. What may not: names on the hub
(`hub.py`), what a row means (`tables.py`), which samples are read together (`data/packing/row_plan.py`).

A part of a stream is some of its files, or of the row groups of Parquet files, by `IterableDataset.shard`: neither part
nor process downloads those of others. It is read by `IterableDataset.iter`, which, unlike iterating over it, does not
split itself once more among the workers of a torch DataLoader: which process reads which part is not the library's to
say (`data/loading/streamed_rows.py`).

An epoch's order is a shuffle of its own, with the seed and the epoch as its seed, and not `set_epoch`: that one writes
to memory that the workers of a loader share while they read different epochs, and mixes the shards of data sets that
nobody asked to shuffle. Nor is it `skip`, after which some orders are others: what lies before is read and left. The
library's `state_dict` does not help either: it loses the samples that wait in the buffer of a shuffle.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.media.images import MediaRoot, media_access
from qwen3vl_bridge.data.schemas.columns import Schema, marked
from qwen3vl_bridge.data.schemas.conversations import Conversation
from qwen3vl_bridge.data.sources.hub import load_named
from qwen3vl_bridge.data.sources.recorded_media import recorded, with_downloads
from qwen3vl_bridge.data.sources.tables import columns_of, conversation_in, library

import numpy as np

logger = logging.getLogger(__name__)

EPOCH = 2**40  # a sample's number is its place in the epoch, and this for each epoch before
_BATCH = 64  # rows that are taken from the library at once
_MANY = 10  # files of a part, from which on it makes no difference that some parts have one more
_of_parents: list[_Reading] = []  # never freed: closing them would wait for threads that only the parent has


@dataclass
class _Reading:
    """Where the stream is read.

    Attributes:
        epoch: which.
        tables: the rest of it.
        place: of the next row in the epoch.
        process: whose it is; one that was forked has its parent's open files, and must not read from them.
    """

    epoch: int
    tables: Generator[Any]
    place: int
    process: int


class StreamedDataset:
    """A streaming data set, read forward, epoch after epoch: pictures are not decoded here.

    The latest rows are kept, with what pictures they hold. A row from before them is found by reading its epoch anew
    from the beginning, as is the first row of a run that goes on: correct, and as slow as that is. Of Parquet files
    Arrow holds more, decoded ahead, up to a whole file of each that is read.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        media_root: MediaRoot = None,
        *,
        seed: int | None = None,
        buffer_size: int = 1000,
        keep: int = 2048,
        schema: Schema | None = None,
    ) -> None:
        """Take a data set's rows as conversations.

        Args:
            dataset: a `datasets.IterableDataset`, whose order is the same in every process.
            name: what messages call it.
            media_root: folder that paths are relative to and may not leave, without which there may be none; or a
                `MediaAccess`.
            seed: of the order, anew each epoch; None for the data set's own, each epoch the same.
            buffer_size: rows that are shuffled together, with the files they are from; each process holds so many.
            keep: how many of the latest rows are kept.
            schema: of the records, where they have a named one.

        Raises:
            DataError: a data set that does not stream, several splits, a node's part, or no column of messages.
            ValueError: a number below what it may be.
        """
        _check_dataset(dataset, name)
        for what, found, least in (("seed", seed or 0, 0), ("buffer_size", buffer_size, 1), ("keep", keep, 1)):
            if found < least:
                raise ValueError(f"{what} is {found}, expected at least {least}")
        if dataset.features is not None:
            # Undoes what the library does for data sets of the hub: decoding ahead, in threads.
            dataset = dataset.decode(False).select_columns(columns_of(dataset.features.arrow_schema, name, schema))
        # Of one of the hub as `HubDataset` has it: downloads go through it by number.
        self.name, self.media = name, recorded(media_access(media_root, None), marked(name, schema))
        self._dataset, self._seed, self._buffer_size, self._keep = dataset, seed, buffer_size, keep
        self._schema = schema
        self._part: tuple[int, int] | None = None
        self._forget()

    @classmethod
    def named(cls, name: str, split: str | None = None, media_root: MediaRoot = None, **how: Any) -> StreamedDataset:
        """A data set of the hub, read as it is downloaded.

        Args:
            name: "owner/name", or as `HubName.of` reads it.
            split: which, where the name does not say it; needless where there is but one.
            media_root: as for the class.
            how: `seed`, `buffer_size`, `keep` and `schema`, as for the class.

        Raises:
            DataError: as for the class, no such data set, configuration or split, or several and none chosen.
            ValueError: as for the class.
        """
        dataset, called = load_named(name, split, streaming=True)
        return cls(dataset, called, media_root, **how)

    def divided(self, parts: int) -> Self:
        """The same, of at least as many files as parts, and as many for each if that can be.

        Args:
            parts: that it is to be read in.

        Raises:
            DataError: it has fewer files, or row groups of Parquet files.
        """
        dataset = self._dataset
        if dataset.num_shards % parts and hasattr(dataset, "reshard"):  # not in early versions
            dataset = dataset.reshard()
        found = dataset.num_shards
        if found < parts:
            raise DataError(
                self.name,
                f"found {found} files or row groups of Parquet files, expected at least {parts}, one for each of the "
                "parts that it is read in: data-parallel ranks x data-loading processes (dataset.num_workers, at least "
                "1) x rows of a microbatch, or dataset.stream_parts. Read it in fewer, or without dataset.streaming",
            )
        if found % parts and found < _MANY * parts:
            text = "%s: %d files or row groups in %d parts; samples of parts with %d come more often than those with %d"
            logger.warning(text, self.name, found, parts, found // parts, found // parts + 1)
        divided = copy.copy(self)
        divided._dataset = dataset
        divided._forget()
        return divided

    def part(self, part: int, parts: int) -> Self:
        """One part of what is `divided`, with numbers, epochs and an order of its own.

        Args:
            part: which, counted from 0.
            parts: how many there are.
        """
        if parts == 1:
            return self
        one = copy.copy(self)
        one._dataset, one._part = self._dataset.shard(parts, part), (part, parts)
        one._forget()
        return one

    def _forget(self) -> None:
        self._reading: _Reading | None = None
        self._kept: dict[int, tuple[Any, int]] = {}  # a table and a row of it, by number, the latest last
        self._seen: dict[int, int] = {}  # how many rows each epoch has, or has at least
        self._ended: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_kept": {}}

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Which samples stand at places `start` to `start + count - 1`; fewer, or none, where the epoch ends.

        Reads as far as it takes to know.

        Args:
            epoch: which pass over the samples.
            start: the first place.
            count: how many places.

        Raises:
            Unreachable: the stream broke off.
        """
        end = start + count
        if self._seen.get(epoch, 0) < end and epoch not in self._ended:
            self._read_to(epoch, end - 1)
        end = min(end, self._seen.get(epoch, 0))
        return range(epoch * EPOCH + start, epoch * EPOCH + max(start, end))

    def sample_id(self, number: int) -> str:
        """The data set's name and the place, counted from 0; of a shuffled one the epoch, of a part which it is."""
        epoch, place = _epoch_and_place(number)
        where = [] if self._seed is None else [f"epoch {epoch}"]
        where += [] if self._part is None else ["part {} of {}".format(*self._part)]
        return f"{self.name}[{place} of {', '.join(where)}]" if where else f"{self.name}[{place}]"

    def fingerprint(self) -> str:
        """What is known without reading, what an order depends on, and what is not there of downloads.

        Raises:
            Unreachable: these have not come to their end.
        """
        found = self._dataset
        parts = [self.name, f"{found.num_shards} shards", f"{found.info.dataset_size} bytes"]
        if self._seed is not None:
            version = library("datasets", self.name).__version__
            parts.append(f"seed {self._seed} in buffers of {self._buffer_size} by datasets {version}")
        return with_downloads(marked(", ".join(parts), self._schema), self.media, self.name)

    def __getitem__(self, number: int) -> Conversation:
        """Read one conversation.

        Raises:
            DataError: a row that is no conversation.
            IndexError: a number behind the epoch's end.
            Unreachable: the stream broke off.
        """
        if number not in self._kept:
            self._read_to(*_epoch_and_place(number))
            if number not in self._kept:
                raise IndexError(f"{self.sample_id(number)} lies behind the end of the epoch")
        table, row = self._kept[number]
        place = self.sample_id(number)
        columns = columns_of(table.schema, place, self._schema)
        return conversation_in(table.select(columns), row, place, self.media, self._schema)

    def _read_to(self, epoch: int, place: int) -> None:
        """Reads until a place is kept, or the epoch ends."""
        reading = self._reading
        if reading is None or (reading.epoch, reading.process) != (epoch, os.getpid()) or reading.place > place:
            reading = self._open(epoch, place)
        while reading.place <= place:
            table = self._next(reading)
            if table is None:
                self._ended.add(epoch)
                return
            first, reading.place = reading.place, reading.place + len(table)
            if reading.place > place - self._keep:  # otherwise it is only read past
                for row in range(len(table)):
                    self._kept.pop(epoch * EPOCH + first + row, None)
                    self._kept[epoch * EPOCH + first + row] = (table, row)
                while len(self._kept) > self._keep + len(table):
                    del self._kept[next(iter(self._kept))]
            self._seen[epoch] = max(self._seen.get(epoch, 0), reading.place)

    def _open(self, epoch: int, place: int) -> _Reading:
        if place > self._keep:
            text = "%s: epoch %d is read from its beginning to reach sample %d; the latest %d are kept"
            logger.warning(text, self.name, epoch, place, self._keep)
        if self._reading is not None and self._reading.process != os.getpid():
            _of_parents.append(self._reading)
        dataset = self._dataset
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch, *(self._part or ())])
            dataset = dataset.shuffle(generator=order, buffer_size=self._buffer_size)
        # Rows of a type that is not known may be of several, which fit no common table.
        tables = dataset.with_format("arrow").iter(batch_size=_BATCH if dataset.features is not None else 1)
        self._reading = _Reading(epoch, tables, 0, os.getpid())
        # At the interpreter's end, too, while the library's modules are there to close their files.
        weakref.finalize(self._reading, _close, tables, os.getpid())
        return self._reading

    def _next(self, reading: _Reading) -> Any | None:
        """The next rows, or None at the epoch's end."""
        try:
            return next(reading.tables, None)
        except Exception as error:  # the network's, the hub's, those of whatever reads its files, and Arrow's
            self._reading = None  # it cannot go on
            raise Unreachable(
                self.sample_id(reading.epoch * EPOCH + reading.place),
                f"found the stream broken off there or soon after ({type(error).__name__}: {error}), expected rows, "
                "and all of one type (load_dataset takes features=...; what is of several types may be strings of "
                "JSON)",
            ) from error


def _close(tables: Generator[Any], process: int) -> None:
    if process == os.getpid():
        tables.close()


def _epoch_and_place(number: int) -> tuple[int, int]:
    if number < 0:
        raise IndexError(f"found the sample {number}, expected one from 0 on: a stream has no known end")
    return divmod(number, EPOCH)


def _check_dataset(dataset: Any, name: str) -> None:
    datasets = library("datasets", name)
    if isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise DataError(name, f"found the splits {', '.join(dataset)}, expected one of them")
    if not isinstance(dataset, datasets.IterableDataset):
        raise DataError(
            name, f"found a {type(dataset).__name__}, expected a streaming data set (HubDataset takes others)"
        )
    if dataset._distributed is not None:
        raise DataError(name, "found a node's part of a data set, expected it whole: it is divided here")
