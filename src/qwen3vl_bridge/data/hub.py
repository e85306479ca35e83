"""Read conversations from data sets of Hugging Face's `datasets`: on disk, on the hub, or streamed.

`datasets` is imported where it is used, because the import is slow.
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

from qwen3vl_bridge.data.conversations import DEFAULT_COLUMNS, Conversation, Schema, add_schema_name
from qwen3vl_bridge.data.data_paths import HUB
from qwen3vl_bridge.data.errors import DataError, DataUnavailable
from qwen3vl_bridge.data.media import MediaRoot, make_media_access
from qwen3vl_bridge.data.tables import columns_to_read, read_conversation
from qwen3vl_bridge.upstream.dataset_fingerprints import fingerprint_of

import numpy as np
import pyarrow as pa

_NAME = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[^@:/#]+))?(:(?P<configuration>[^#]+)|/(?P<files>[^#]+))?"
    r"(#(?P<split>.+))?"
)
_FILES = re.compile(r"[*?\[]|\.(parquet|jsonl?|arrow)(\.\w+)?$")  # anything else is a folder


@dataclass(frozen=True)
class HubName:
    """Name of a data set on the hub.

    `files` is a folder of the repository, a file or a pattern, and replaces `configuration`. `datasets` reads such
    files as one split, "train", unless the files of a folder are named by split.
    """

    repository: str
    configuration: str | None = None
    split: str | None = None
    revision: str | None = None
    files: str | None = None

    @classmethod
    def parse(cls, path: str) -> Self:
        """Parse "hf://owner/name@revision:configuration#split". Only the owner and the name are required.

        Also parse Hugging Face's own form "hf://datasets/owner/name@revision/files". Write "/" in a revision as "%2F".
        Raise DataError for any other text.
        """
        name = path.removeprefix(HUB)
        match = _NAME.fullmatch(name.removeprefix("datasets/"))
        if match is None or (match["files"] and not name.startswith("datasets/")):
            formats = "hf://owner/name, hf://owner/name:configuration#split or hf://datasets/owner/name/files"
            raise DataError(path, f"found the name {name!r}, expected {formats}")
        found = match.groupdict()
        return cls(**found | {"revision": found["revision"] and unquote(found["revision"])})

    def __str__(self) -> str:
        """Return the name for messages and sample ids, without "hf://"."""
        parts = (("@", self.revision), (":", self.configuration), ("/", self.files), ("#", self.split))
        name = "".join(f"{mark}{part}" for mark, part in parts if part is not None)
        return f"{'datasets/' if self.files else ''}{self.repository}{name}"

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments for functions such as `datasets.load_dataset`, without the split."""
        named = (self.repository,) if self.configuration is None else (self.repository, self.configuration)
        of_files = "data_files" if self.files and _FILES.search(self.files) else "data_dir"
        others = {"revision": self.revision, of_files: self.files and self.files.strip("/")}
        return named, {name: value for name, value in others.items() if value is not None}


class HubDataset:
    """A map-style data set of Hugging Face's `datasets`. Images are read as stored, not decoded."""

    def __init__(
        self,
        dataset: Any,
        name: str,
        media_root: MediaRoot = None,
        schema: Schema = DEFAULT_COLUMNS,
        download_key: str | None = None,
    ) -> None:
        """Read the rows of a `datasets.Dataset` with at least one row as conversations.

        Args:
            dataset: the `datasets.Dataset`.
            name: name of the data set, shown in errors and logs.
            media_root: folder of images and videos; None to allow no paths.
            schema: converts a row to a record in our format.
            download_key: key of the data set's download record; None for the fingerprint that `datasets` computes.
        """
        if not len(dataset):
            raise DataError(name, "found no rows, expected one conversation a row")
        self.name, self._schema = name, schema
        columns = columns_to_read(dataset.features.arrow_schema, name, schema)
        self._rows = dataset.select_columns(columns).with_format("arrow")
        self._fingerprint = fingerprint_of(dataset)
        self.download_key = add_schema_name(download_key or self._fingerprint, schema)
        self.media = make_media_access(media_root, None).for_data(self.download_key)

    @classmethod
    def from_disk(
        cls, folder: str | Path, media_root: MediaRoot = None, schema: Schema = DEFAULT_COLUMNS
    ) -> HubDataset:
        """Open a folder written by `save_to_disk`. By default, media paths are relative to that folder."""
        import datasets

        folder = Path(folder)
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
            raise DataError(str(folder), f"found the splits {', '.join(splits)}; choose one with {folder}/SPLIT")
        try:
            dataset = datasets.load_from_disk(str(folder))
        except Exception as error:  # any of Arrow's, JSON's and its own
            raise DataError(str(folder), f"found a data set that does not load ({error})") from error
        return cls(dataset, folder.name, make_media_access(media_root, folder), schema)

    @classmethod
    def from_hub(cls, name: str, media_root: MediaRoot = None, schema: Schema = DEFAULT_COLUMNS) -> HubDataset:
        """Open a data set on the hub by a name such as "hf://owner/name", from the local cache if it is there.

        Raises:
            DataError: the data set cannot be loaded, or has several configurations or splits and none is chosen.
        """
        dataset, called = load_hub_dataset(name)
        source = cls(dataset, called, media_root, schema, download_key=called)
        # The library's own fingerprint contains times of cached files, which differ between machines.
        source._fingerprint = f"{called}, {len(source)} rows, {dataset.info.dataset_size} bytes"
        return source

    def __len__(self) -> int:
        return len(self._rows)

    def sample_id(self, index: int) -> str:
        """Return the name of the data set and the index of the row, such as "owner/name#train[0]"."""
        return f"{self.name}[{range(len(self))[index]}]"

    def fingerprint(self) -> str:
        """Return a text that identifies the data, and the URLs in it that could not be downloaded.

        The text has the name, rows and bytes of a data set on the hub, or the fingerprint that `datasets` computes.
        """
        return self.media.add_missing_urls(add_schema_name(self._fingerprint, self._schema))

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation."""
        place = self.sample_id(index)
        try:
            table = self._rows[range(len(self))[index]]
        except (OSError, pa.ArrowException) as error:
            raise DataError(place, f"cannot read the row ({error})") from error
        return read_conversation(table, 0, place, self.media, self._schema)


def load_hub_dataset(name: str, **how: Any) -> tuple[Any, str]:
    """Load a data set by a name such as "hf://owner/name"; return it, and its full name with the split.

    `how`: further arguments for `datasets.load_dataset`.

    Raises:
        DataError: the data set is unknown, or has several configurations or splits and none is chosen.
    """
    import datasets

    found = HubName.parse(name)
    place = f"{HUB}{replace(found, split=None)}"
    named, others = found.arguments()
    try:
        splits = [found.split] if found.split else datasets.get_dataset_split_names(*named, **others)
        dataset = datasets.load_dataset(*named, split=splits[0], **others, **how) if len(splits) == 1 else None
    except Exception as error:  # errors of the network, the hub, and file formats
        raise DataError(place, f"found a data set that does not load ({error})") from error
    if dataset is None:
        raise DataError(place, f"found the splits {', '.join(splits)}; choose one, such as {place}#{splits[0]}")
    return dataset, str(replace(found, split=splits[0]))


logger = logging.getLogger(__name__)

EPOCH_STRIDE = 2**40  # a sample's number is its index in the epoch plus this for each previous epoch
_BATCH = 64  # rows that are read from the library at once
_MANY = 10  # with this many files per part, an uneven division makes no difference


@dataclass
class _ReadState:
    """Position of one process in a stream. The process reads the row with index `place` of the epoch next."""

    epoch: int
    tables: Generator[Any]
    place: int = 0


class StreamedDataset:
    """A streaming data set of Hugging Face's `datasets`, read forward, epoch after epoch. Images are not decoded here.

    The latest rows are cached, with their images. Earlier rows, and the first row of a resumed run, are found by
    rereading the epoch from the start, which is slow.

    A part of a stream is a subset of its files, or of the row groups of Parquet files (`IterableDataset.shard`), so
    each process downloads only its own part. Each epoch is shuffled with its own seed.
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
        schema: Schema = DEFAULT_COLUMNS,
    ) -> None:
        """Read conversations from a `datasets.IterableDataset` that has the same order in every process.

        Args:
            name: name of the data set, shown in errors and logs.
            media_root: folder of images and videos; None to allow no paths.
            seed: seed of the order, which differs in each epoch; None for the order of the data set.
            buffer_size: rows in the shuffle buffer of each process, with their files in memory.
            keep: number of the latest rows that are cached.
        """
        if dataset.features is not None:
            # Undo what the library does for data sets of the hub: decoding ahead, in threads.
            dataset = dataset.decode(False).select_columns(columns_to_read(dataset.features.arrow_schema, name, schema))
        # The same download key as `HubDataset`, which `qwen3vl data download` uses for data sets on the hub.
        self.name, self.media = name, make_media_access(media_root, None).for_data(add_schema_name(name, schema))
        self._dataset, self._seed, self._buffer_size, self._keep = dataset, seed, buffer_size, keep
        self._schema = schema
        self._part: tuple[int, int] | None = None
        self._reset()

    @classmethod
    def from_hub(cls, name: str, media_root: MediaRoot = None, **how: Any) -> StreamedDataset:
        """Stream a data set from the hub by a name such as "hf://owner/name". `how`: further arguments of the class."""
        dataset, called = load_hub_dataset(name, streaming=True)
        return cls(dataset, called, media_root, **how)

    def divide(self, parts: int) -> Self:
        """Return a copy of the data set that the method `part` can split into `parts` parts.

        The files of the data set are divided over the parts, equally if their number allows it.

        Raises:
            DataError: there are fewer files (or row groups of Parquet files) than parts.
        """
        dataset = self._dataset
        if dataset.num_shards % parts and hasattr(dataset, "reshard"):  # not in early versions
            dataset = dataset.reshard()
        found = dataset.num_shards
        if found < parts:
            raise DataError(
                self.name,
                f"found {found} files or row groups of Parquet files, expected at least {parts}, one for each part "
                f"of the "
                "stream: data-parallel ranks x data-loading processes (dataset.num_workers, at least 1) x rows of a "
                "microbatch, or dataset.stream_parts. Use fewer parts, or turn dataset.streaming off",
            )
        if found % parts and found < _MANY * parts:
            text = (
                "%s: %d files or row groups are divided into %d parts of %d or %d. Samples of the smaller parts are "
                "read more often. To avoid this, use a number of parts that divides the number of files or row groups"
            )
            logger.warning(text, self.name, found, parts, found // parts, found // parts + 1)
        return self._with_dataset(dataset, None)

    def part(self, part: int, parts: int) -> Self:
        """Return the part with index `part` of a divided data set. It has its own sample numbers, epochs and order."""
        return self if parts == 1 else self._with_dataset(self._dataset.shard(parts, part), (part, parts))

    def _with_dataset(self, dataset: Any, part: tuple[int, int] | None) -> Self:
        one = copy.copy(self)
        one._dataset, one._part = dataset, part
        one._reset()
        return one

    def _reset(self) -> None:
        # By process id. A forked worker keeps the state of its parent: closing that would wait for threads that only
        # the parent has.
        self._readings: dict[int, _ReadState] = {}
        self._kept: dict[int, tuple[Any, int]] = {}  # by sample number, an Arrow table and its row; the latest last
        self._seen: dict[int, int] = {}  # by epoch, the number of rows seen
        self._ended: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readings": {}, "_kept": {}}

    def sample_numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Return the sample numbers at positions `start` to `start + count - 1` of an epoch; fewer if the epoch ends.

        Read the stream as far as necessary; raise DataUnavailable if it is interrupted.
        """
        end = start + count
        if self._seen.get(epoch, 0) < end and epoch not in self._ended:
            self._read_to(epoch, end - 1)
        end = min(end, self._seen.get(epoch, 0))
        return range(epoch * EPOCH_STRIDE + start, epoch * EPOCH_STRIDE + max(start, end))

    def sample_id(self, number: int) -> str:
        """Return the location of a sample for messages, such as "owner/name#train[3 of epoch 0, part 1 of 2]"."""
        epoch, place = _epoch_and_place(number)
        where = [] if self._seed is None else [f"epoch {epoch}"]
        where += [] if self._part is None else ["part {} of {}".format(*self._part)]
        return f"{self.name}[{place} of {', '.join(where)}]" if where else f"{self.name}[{place}]"

    def fingerprint(self) -> str:
        """Return a text that identifies the data, their order, and the URLs in them that could not be downloaded.

        Nothing is read from the stream.
        """
        import datasets

        found = self._dataset
        parts = [self.name, f"{found.num_shards} shards", f"{found.info.dataset_size} bytes"]
        if self._seed is not None:
            order = f"seed {self._seed} in buffers of {self._buffer_size} by datasets {datasets.__version__}"
            parts.append(order)
        return self.media.add_missing_urls(add_schema_name(", ".join(parts), self._schema))

    def __getitem__(self, number: int) -> Conversation:
        """Read one conversation.

        Raises:
            IndexError: the number is after the end of its epoch.
            DataUnavailable: the stream is interrupted.
        """
        if number not in self._kept:
            self._read_to(*_epoch_and_place(number))
            if number not in self._kept:
                raise IndexError(f"{self.sample_id(number)} is after the end of the epoch")
        table, row = self._kept[number]
        place = self.sample_id(number)
        columns = columns_to_read(table.schema, place, self._schema)
        return read_conversation(table.select(columns), row, place, self.media, self._schema)

    def _read_to(self, epoch: int, place: int) -> None:
        """Read the stream until the row at index `place` of an epoch is cached, or the epoch ends."""
        reading = self._readings.get(os.getpid())
        if reading is None or reading.epoch != epoch or reading.place > place:
            reading = self._open(epoch, place)
        while reading.place <= place:
            try:
                table = next(reading.tables, None)
            except Exception as error:  # errors of the network, the hub, file formats, and Arrow
                del self._readings[os.getpid()]  # it cannot continue
                raise DataUnavailable(
                    self.sample_id(epoch * EPOCH_STRIDE + reading.place),
                    f"the stream was interrupted there or soon after ({type(error).__name__}: {error}). If the values "
                    "of a column have several types, pass features=... to load_dataset, or store them as JSON strings",
                ) from error
            if table is None:
                self._ended.add(epoch)
                return
            first, reading.place = reading.place, reading.place + len(table)
            if reading.place > place - self._keep:  # earlier rows are discarded
                for row in range(len(table)):
                    self._kept.pop(epoch * EPOCH_STRIDE + first + row, None)
                    self._kept[epoch * EPOCH_STRIDE + first + row] = (table, row)
                while len(self._kept) > self._keep + len(table):
                    del self._kept[next(iter(self._kept))]
            self._seen[epoch] = max(self._seen.get(epoch, 0), reading.place)

    def _open(self, epoch: int, place: int) -> _ReadState:
        if place > self._keep:
            text = "%s: epoch %d is read from its beginning to reach sample %d; the latest %d are cached"
            logger.warning(text, self.name, epoch, place, self._keep)
        dataset = self._dataset
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch, *(self._part or ())])
            dataset = dataset.shuffle(generator=order, buffer_size=self._buffer_size)
        # Rows of an unknown type may differ in type, and do not fit into one table.
        tables = dataset.with_format("arrow").iter(batch_size=_BATCH if dataset.features is not None else 1)
        reading = self._readings[os.getpid()] = _ReadState(epoch, tables)
        # Also at the interpreter's exit, while the library's modules can still close their files.
        weakref.finalize(reading, _close, tables, os.getpid())
        return reading


def _close(tables: Generator[Any], process: int) -> None:
    if process == os.getpid():
        tables.close()


def _epoch_and_place(number: int) -> tuple[int, int]:
    if number < 0:
        raise IndexError(f"sample index is {number}, expected 0 or more: a streamed data set has no known length")
    return divmod(number, EPOCH_STRIDE)
