"""Conversations in streaming data sets of Hugging Face's `datasets`, of unknown length and without random access.

A part of a stream is a subset of its files, or of the row groups of Parquet files (`IterableDataset.shard`), so each
process downloads only its own. Parts are read with `IterableDataset.iter`, which, unlike iteration, does not split once
more over the workers of a torch DataLoader: `data/loading/streamed_rows.py` assigns parts to processes.

Each epoch is shuffled with a seed derived from the run's seed and the epoch. `set_epoch` is not used, because it writes
to memory shared by workers that read different epochs, and shuffles the shards of data sets that should not be
shuffled; nor `skip`, because it changes some orders (earlier rows are read and discarded instead); nor `state_dict`,
because it loses the samples in the shuffle buffer.
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
from qwen3vl_bridge.data.media.media_access import MediaRoot, media_access
from qwen3vl_bridge.data.schemas.conversations import Conversation
from qwen3vl_bridge.data.schemas.record_schemas import Schema, marked
from qwen3vl_bridge.data.sources.hub import load_named
from qwen3vl_bridge.data.sources.tables import columns_of, conversation_in, library

import numpy as np

logger = logging.getLogger(__name__)

EPOCH = 2**40  # a sample's number is its index in the epoch plus this for each previous epoch
_BATCH = 64  # rows that are read from the library at once
_MANY = 10  # files of a part, from which on an uneven division makes no difference
_of_parents: list[_Reading] = []  # never freed: closing them would wait for threads that only the parent has


@dataclass
class _Reading:
    """State of reading the stream."""

    epoch: int
    tables: Generator[Any]
    place: int
    process: int


class StreamedDataset:
    """A streaming data set, read forward, epoch after epoch: images are not decoded here.

    The latest rows are kept, with their images. Earlier rows, and the first row of a resumed run, are found by
    rereading the epoch from the start, which is slow. For Parquet files Arrow keeps more in memory, decoded ahead, up
    to one whole file for each that is being read.
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
        """Read a data set's rows as conversations.

        Args:
            dataset: a `datasets.IterableDataset`, whose order is the same in every process.
            name: its name in messages.
            media_root: folder that paths are relative to and must not leave; None if paths are not allowed; or a
                `MediaAccess`.
            seed: seed of the order, different in each epoch; None for the data set's own order, equal in each epoch.
            buffer_size: size of the shuffle buffer in rows, with their files in memory in each process.
            keep: number of latest rows that are kept.
            schema: schema of the records, or None.

        Raises:
            DataError: a data set that does not stream, several splits, a node's part, or no column of messages.
            ValueError: a number below its minimum.
        """
        _check_dataset(dataset, name)
        for what, found, least in (("seed", seed or 0, 0), ("buffer_size", buffer_size, 1), ("keep", keep, 1)):
            if found < least:
                raise ValueError(f"{what} is {found}, expected at least {least}")
        if dataset.features is not None:
            # Undo what the library does for data sets of the hub: decoding ahead, in threads.
            dataset = dataset.decode(False).select_columns(columns_of(dataset.features.arrow_schema, name, schema))
        # Of one of the hub as `HubDataset` has it: downloads go through it by number.
        self.name, self.media = name, media_access(media_root, None).of_data(marked(name, schema))
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
        """The same data set with at least as many files as parts, and if possible an equal number for each.

        Args:
            parts: number of parts.

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
        """One part of a `divided` data set, with its own numbers, epochs and order.

        Args:
            part: index of the part.
            parts: number of parts.
        """
        if parts == 1:
            return self
        one = copy.copy(self)
        one._dataset, one._part = self._dataset.shard(parts, part), (part, parts)
        one._forget()
        return one

    def _forget(self) -> None:
        self._reading: _Reading | None = None
        self._kept: dict[int, tuple[Any, int]] = {}  # by number, a table and a row of it, the latest last
        self._seen: dict[int, int] = {}  # by epoch, the number of rows seen
        self._ended: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_kept": {}}

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Numbers of the samples at positions `start` to `start + count - 1`; fewer, or none, if the epoch ends.

        Reads the stream as far as necessary.

        Args:
            epoch: the pass over the samples.
            start: the first position.
            count: number of positions.

        Raises:
            Unreachable: the stream was interrupted.
        """
        end = start + count
        if self._seen.get(epoch, 0) < end and epoch not in self._ended:
            self._read_to(epoch, end - 1)
        end = min(end, self._seen.get(epoch, 0))
        return range(epoch * EPOCH + start, epoch * EPOCH + max(start, end))

    def sample_id(self, number: int) -> str:
        """The data set's name and the index; for a shuffled one the epoch, for a part its index."""
        epoch, place = _epoch_and_place(number)
        where = [] if self._seed is None else [f"epoch {epoch}"]
        where += [] if self._part is None else ["part {} of {}".format(*self._part)]
        return f"{self.name}[{place} of {', '.join(where)}]" if where else f"{self.name}[{place}]"

    def fingerprint(self) -> str:
        """What is known without reading, what the order depends on, and the files that were not downloaded.

        Raises:
            Unreachable: the download is not complete.
        """
        found = self._dataset
        parts = [self.name, f"{found.num_shards} shards", f"{found.info.dataset_size} bytes"]
        if self._seed is not None:
            version = library("datasets", self.name).__version__
            parts.append(f"seed {self._seed} in buffers of {self._buffer_size} by datasets {version}")
        return self.media.mark(marked(", ".join(parts), self._schema), self.name)

    def __getitem__(self, number: int) -> Conversation:
        """Read one conversation.

        Raises:
            DataError: a row that is not a conversation.
            IndexError: a number after the epoch's end.
            Unreachable: the stream was interrupted.
        """
        if number not in self._kept:
            self._read_to(*_epoch_and_place(number))
            if number not in self._kept:
                raise IndexError(f"{self.sample_id(number)} is after the end of the epoch")
        table, row = self._kept[number]
        place = self.sample_id(number)
        columns = columns_of(table.schema, place, self._schema)
        return conversation_in(table.select(columns), row, place, self.media, self._schema)

    def _read_to(self, epoch: int, place: int) -> None:
        """Read until a row is kept, or the epoch ends."""
        reading = self._reading
        if reading is None or (reading.epoch, reading.process) != (epoch, os.getpid()) or reading.place > place:
            reading = self._open(epoch, place)
        while reading.place <= place:
            table = self._next(reading)
            if table is None:
                self._ended.add(epoch)
                return
            first, reading.place = reading.place, reading.place + len(table)
            if reading.place > place - self._keep:  # earlier rows are discarded
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
        # Rows of an unknown type may differ in type, and do not fit into one table.
        tables = dataset.with_format("arrow").iter(batch_size=_BATCH if dataset.features is not None else 1)
        self._reading = _Reading(epoch, tables, 0, os.getpid())
        # Also at the interpreter's exit, while the library's modules can still close their files.
        weakref.finalize(self._reading, _close, tables, os.getpid())
        return self._reading

    def _next(self, reading: _Reading) -> Any | None:
        """The next rows, or None at the epoch's end."""
        try:
            return next(reading.tables, None)
        except Exception as error:  # errors of the network, the hub, file formats, and Arrow
            self._reading = None  # it cannot continue
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
