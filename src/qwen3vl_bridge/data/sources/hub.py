"""Conversations in data sets of Hugging Face's `datasets`: on disk, on the hub, or read while they are downloaded.

`datasets` is imported where it is used, because that is slow.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.media.media_access import MediaRoot, media_access
from qwen3vl_bridge.data.schemas.conversations import Conversation
from qwen3vl_bridge.data.schemas.record_schemas import OURS, Schema, marked
from qwen3vl_bridge.data.sources import HUB
from qwen3vl_bridge.data.sources.tables import columns_of, conversation_in

import numpy as np
import pyarrow as pa

_NAME = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[^@:/#]+))?(:(?P<configuration>[^#]+)|/(?P<files>[^#]+))?"
    r"(#(?P<split>.+))?"
)
_FILES = re.compile(r"[*?\[]|\.(parquet|jsonl?|arrow)(\.\w+)?$")  # anything else is a folder


@dataclass(frozen=True)
class HubName:
    """Name of a data set of the hub.

    `files` is a folder of the repository, a file or a pattern, instead of a configuration; `datasets` treats these as
    one split, "train", unless a folder's files are named by splits.
    """

    repository: str
    configuration: str | None = None
    split: str | None = None
    revision: str | None = None
    files: str | None = None

    @classmethod
    def of(cls, path: str) -> Self:
        """Read "hf://owner/name@revision:configuration#split"; all parts except owner and name are optional.

        Hugging Face's own "hf://datasets/owner/name@revision/files" means the same, and "/" in a revision is "%2F".
        """
        name = path.removeprefix(HUB)
        spelled = _NAME.fullmatch(name.removeprefix("datasets/"))
        if spelled is None or (spelled["files"] and not name.startswith("datasets/")):
            spellings = "hf://owner/name, hf://owner/name:configuration#split or hf://datasets/owner/name/files"
            raise DataError(path, f"found the name {name!r}, expected {spellings}")
        found = spelled.groupdict()
        return cls(**found | {"revision": found["revision"] and unquote(found["revision"])})

    def __str__(self) -> str:
        """The name for messages and sample ids, without "hf://"."""
        parts = (("@", self.revision), (":", self.configuration), ("/", self.files), ("#", self.split))
        name = "".join(f"{mark}{part}" for mark, part in parts if part is not None)
        return f"{'datasets/' if self.files else ''}{self.repository}{name}"

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for functions of `datasets`, except the split."""
        named = (self.repository,) if self.configuration is None else (self.repository, self.configuration)
        of_files = "data_files" if self.files and _FILES.search(self.files) else "data_dir"
        others = {"revision": self.revision, of_files: self.files and self.files.strip("/")}
        return named, {name: value for name, value in others.items() if value is not None}


class HubDataset:
    """A map-style data set of Hugging Face's `datasets`, read as it is stored: images are not decoded here."""

    def __init__(
        self,
        dataset: Any,
        name: str,
        media_root: MediaRoot = None,
        schema: Schema = OURS,
        recorded_as: str | None = None,
    ) -> None:
        """Read the rows (at least one) of a `datasets.Dataset`, called `name` in messages, as conversations.

        Without a `media_root`, paths are not allowed. The download record calls the data `recorded_as`, by default the
        library's fingerprint.
        """
        if not len(dataset):
            raise DataError(name, "found no rows, expected one conversation a row")
        self.name, self._schema = name, schema
        columns = columns_of(dataset.features.arrow_schema, name, schema)
        self._rows = dataset.select_columns(columns).with_format("arrow")
        self.recorded_as, self._fingerprint = marked(recorded_as or dataset._fingerprint, schema), dataset._fingerprint
        self.media = media_access(media_root, None).of_data(self.recorded_as)

    @classmethod
    def saved(cls, folder: str | Path, media_root: MediaRoot = None, schema: Schema = OURS) -> HubDataset:
        """A folder written by `save_to_disk`. Paths are relative to that folder by default."""
        import datasets

        folder = Path(folder)
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
            raise DataError(str(folder), f"found the splits {', '.join(splits)}, expected one, as {folder}/SPLIT")
        try:
            dataset = datasets.load_from_disk(str(folder))
        except Exception as error:  # any of Arrow's, JSON's and its own
            raise DataError(str(folder), f"found a data set that does not load ({error})") from error
        return cls(dataset, folder.name, media_access(media_root, folder), schema)

    @classmethod
    def named(cls, name: str, media_root: MediaRoot = None, schema: Schema = OURS) -> HubDataset:
        """A data set of the hub, downloaded or cached; arguments and errors as for `load_named` and the class."""
        dataset, called = load_named(name)
        source = cls(dataset, called, media_root, schema, recorded_as=called)
        # The library's own fingerprint contains times of cached files, which differ between machines.
        source._fingerprint = f"{called}, {len(source)} rows, {dataset.info.dataset_size} bytes"
        return source

    def __len__(self) -> int:
        return len(self._rows)

    def sample_id(self, index: int) -> str:
        """The data set's name and the row, counted from 0."""
        return f"{self.name}[{range(len(self))[index]}]"

    def fingerprint(self) -> str:
        """The library's own; of one of the hub name, rows and bytes; and the files that were not downloaded."""
        return self.media.mark(marked(self._fingerprint, self._schema), self.name)

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation."""
        place = self.sample_id(index)
        try:
            table = self._rows[range(len(self))[index]]
        except (OSError, pa.ArrowException) as error:
            raise DataError(place, f"found a row unreadable ({error})") from error
        return conversation_in(table, 0, place, self.media, self._schema)


def load_named(name: str, **how: Any) -> tuple[Any, str]:
    """A data set of the hub, by any form that `HubName.of` reads, and its name with the split; a `DataError` for an
    unknown one, or several configurations or splits and none chosen. `how` is for `datasets.load_dataset`.
    """
    import datasets

    found = HubName.of(name)
    place = f"{HUB}{replace(found, split=None)}"
    named, others = found.arguments()
    try:
        splits = [found.split] if found.split else datasets.get_dataset_split_names(*named, **others)
        dataset = datasets.load_dataset(*named, split=splits[0], **others, **how) if len(splits) == 1 else None
    except Exception as error:  # errors of the network, the hub, and file formats
        raise DataError(place, f"found a data set that does not load ({error})") from error
    if dataset is None:
        raise DataError(place, f"found the splits {', '.join(splits)}, expected one, as {place}#{splits[0]}")
    return dataset, str(replace(found, split=splits[0]))


logger = logging.getLogger(__name__)

EPOCH = 2**40  # a sample's number is its index in the epoch plus this for each previous epoch
_BATCH = 64  # rows that are read from the library at once
_MANY = 10  # files of a part, from which on an uneven division makes no difference


@dataclass
class _Reading:
    """State of reading the stream in a process: the rows that come next begin at `place` of the epoch."""

    epoch: int
    tables: Generator[Any]
    place: int = 0


class StreamedDataset:
    """A streaming data set, read forward, epoch after epoch: images are not decoded here.

    The latest rows are kept, with their images. Earlier rows, and the first row of a resumed run, are found by
    rereading the epoch from the start, which is slow.

    A part of a stream is a subset of its files, or of the row groups of Parquet files (`IterableDataset.shard`), so
    each process downloads only its own. Parts are read with `IterableDataset.iter`, which, unlike iteration, does not
    split once more over the workers of a torch DataLoader: `StreamedRows` assigns parts to processes.

    Each epoch is shuffled with a seed derived from the run's seed and the epoch. `set_epoch` is not used, because it
    writes to memory shared by workers that read different epochs, and shuffles the shards of data sets that should not
    be shuffled; nor `skip`, because it changes some orders (earlier rows are read and discarded instead); nor
    `state_dict`, because it loses the samples in the shuffle buffer.
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
        schema: Schema = OURS,
    ) -> None:
        """Read the rows of a `datasets.IterableDataset`, whose order is the same in every process, like `HubDataset`.

        A `seed` is of the order, different in each epoch; None for the data set's own order, equal in each epoch. The
        shuffle buffer holds `buffer_size` rows, with their files in memory in each process; `keep` rows are kept.
        """
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
    def named(cls, name: str, media_root: MediaRoot = None, **how: Any) -> StreamedDataset:
        """A data set of the hub, read as it is downloaded; arguments and errors as for `load_named` and the class."""
        dataset, called = load_named(name, streaming=True)
        return cls(dataset, called, media_root, **how)

    def divided(self, parts: int) -> Self:
        """The same data set with at least as many files as parts (DataError), if possible equally many for each."""
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
        return self._of(dataset, None)

    def part(self, part: int, parts: int) -> Self:
        """One part of a `divided` data set, by its index, with its own numbers, epochs and order."""
        return self if parts == 1 else self._of(self._dataset.shard(parts, part), (part, parts))

    def _of(self, dataset: Any, part: tuple[int, int] | None) -> Self:
        one = copy.copy(self)
        one._dataset, one._part = dataset, part
        one._forget()
        return one

    def _forget(self) -> None:
        # By process. A worker keeps its parent's: closing it would wait for threads that only the parent has.
        self._readings: dict[int, _Reading] = {}
        self._kept: dict[int, tuple[Any, int]] = {}  # by number, a table and a row of it, the latest last
        self._seen: dict[int, int] = {}  # by epoch, the number of rows seen
        self._ended: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readings": {}, "_kept": {}}

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Numbers of the samples at positions `start` to `start + count - 1`; fewer, or none, if the epoch ends.

        Reads the stream as far as necessary; `Unreachable` if it is interrupted.
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
        """What is known without reading, what the order depends on, and the files that were not downloaded."""
        import datasets

        found = self._dataset
        parts = [self.name, f"{found.num_shards} shards", f"{found.info.dataset_size} bytes"]
        if self._seed is not None:
            order = f"seed {self._seed} in buffers of {self._buffer_size} by datasets {datasets.__version__}"
            parts.append(order)
        return self.media.mark(marked(", ".join(parts), self._schema), self.name)

    def __getitem__(self, number: int) -> Conversation:
        """Read one conversation; IndexError after the epoch's end, `Unreachable` if the stream is interrupted."""
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
        reading = self._readings.get(os.getpid())
        if reading is None or reading.epoch != epoch or reading.place > place:
            reading = self._open(epoch, place)
        while reading.place <= place:
            try:
                table = next(reading.tables, None)
            except Exception as error:  # errors of the network, the hub, file formats, and Arrow
                del self._readings[os.getpid()]  # it cannot continue
                raise Unreachable(
                    self.sample_id(epoch * EPOCH + reading.place),
                    f"found the stream broken off there or soon after ({type(error).__name__}: {error}), expected "
                    "rows, and all of one type (load_dataset takes features=...; what is of several types may be "
                    "strings of JSON)",
                ) from error
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
        dataset = self._dataset
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch, *(self._part or ())])
            dataset = dataset.shuffle(generator=order, buffer_size=self._buffer_size)
        # Rows of an unknown type may differ in type, and do not fit into one table.
        tables = dataset.with_format("arrow").iter(batch_size=_BATCH if dataset.features is not None else 1)
        reading = self._readings[os.getpid()] = _Reading(epoch, tables)
        # Also at the interpreter's exit, while the library's modules can still close their files.
        weakref.finalize(reading, _close, tables, os.getpid())
        return reading


def _close(tables: Generator[Any], process: int) -> None:
    if process == os.getpid():
        tables.close()


def _epoch_and_place(number: int) -> tuple[int, int]:
    if number < 0:
        raise IndexError(f"found the sample {number}, expected one from 0 on: a stream has no known end")
    return divmod(number, EPOCH)
