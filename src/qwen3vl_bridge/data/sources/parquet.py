"""Conversations in Parquet files."""

from __future__ import annotations

import logging
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.media_access import MediaRoot, media_access
from qwen3vl_bridge.data.schemas.conversations import Conversation
from qwen3vl_bridge.data.schemas.record_schemas import Schema, marked
from qwen3vl_bridge.data.sources.parquet_digest import ParquetDigest
from qwen3vl_bridge.data.sources.tables import columns_of, conversation_in, library

logger = logging.getLogger(__name__)

# Row groups of a source that one process keeps. Each data-loading worker is a process.
CACHE_BYTES, CACHE_GROUPS = 256 * 2**20, 16
_SPLIT = re.compile(r"(train|valid|val|validation|dev|test|eval)(?=[-_.])")


class Parquet:
    """Rows of Parquet files.

    Random access reads a whole row group, so files with small ones are faster to shuffle; folders written by
    `save_to_disk` of Hugging Face's `datasets` have no row groups, and are faster still.
    """

    def __init__(self, path: str | Path, media_root: MediaRoot = None, schema: Schema | None = None) -> None:
        """Read the offsets of rows.

        Args:
            path: a file, a folder of them, or a pattern such as "data/train-*.parquet"; files are ordered by name.
            media_root: folder that paths are relative to and must not leave, the files' own by default; or a
                `MediaAccess`.
            schema: schema of the records, or None.

        Raises:
            DataError: no file, one that is not Parquet or is truncated, one without messages, or no rows; files of
                several splits; pyarrow is not installed.
        """
        self.path, self._schema = Path(path), schema
        self._files = _parquet_files(self.path)
        self.media = media_access(media_root, self._files[0].parent)
        self._columns: list[list[str]] = []
        self._first_rows, self._groups = array("Q"), []
        self._starts, rows, digest = array("Q"), 0, ParquetDigest()
        for number, file in enumerate(self._files):
            metadata = _parquet_metadata(file)
            self._columns.append(columns_of(metadata.schema.to_arrow_schema(), str(file), schema))
            self._first_rows.append(rows)
            for group in range(metadata.num_row_groups):
                self._starts.append(rows)
                self._groups.append((number, group))
                rows += metadata.row_group(group).num_rows
            with _readable(file):
                digest.add(file, metadata, self._columns[number])
            _warn_of_large_groups(file, metadata)
        if not rows:
            raise DataError(str(self.path), "found no rows, expected one conversation a row")
        self._len = rows
        with _readable(self.path):
            self.recorded_as = marked(f"{rows} rows, {digest.hexdigest()}", schema)
        self.media = self.media.of_data(self.recorded_as)
        self._cache: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    def __len__(self) -> int:
        return self._len

    def sample_id(self, index: int) -> str:
        """File and index of the row in it."""
        row = range(len(self))[index]
        file = bisect_right(self._first_rows, row) - 1
        return f"{self._files[file].name}[{row - self._first_rows[file]}]"

    def fingerprint(self) -> str:
        """Number of rows, a digest of the files, in order (see `parquet_digest.py`), and the files that were not
        downloaded.

        Raises:
            Unreachable: the download is not complete.
        """
        return self.media.mark(self.recorded_as, str(self.path))

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation.

        Raises:
            DataError: a row that cannot be read, or is not a conversation.
        """
        place, row = self.sample_id(index), range(len(self))[index]
        group = bisect_right(self._starts, row) - 1  # the last of those that start here: the others are empty
        return conversation_in(self._group(group, place), row - self._starts[group], place, self.media, self._schema)

    def _group(self, number: int, place: str) -> Any:
        table = self._cache.pop(number, None)
        if table is None:
            table = self._read(number, place)
        self._cache[number] = table  # the most recently used is last
        while len(self._cache) > 1 and (
            len(self._cache) > CACHE_GROUPS or sum(kept.nbytes for kept in self._cache.values()) > CACHE_BYTES
        ):
            del self._cache[next(iter(self._cache))]
        return table

    def _read(self, number: int, place: str) -> Any:
        parquet, (file, group) = library("pyarrow.parquet", place), self._groups[number]
        try:
            # Opened again for each read: forked workers would share an open file and its position.
            with parquet.ParquetFile(self._files[file]) as opened:
                return opened.read_row_group(group, columns=self._columns[file], use_threads=False)
        except (OSError, library("pyarrow", place).ArrowException) as error:
            raise DataError(place, f"found row group {group} unreadable ({error})") from error


def _parquet_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
    else:
        files = sorted(path.parent.glob(path.name)) if "*" in path.name else [path]
    if not files or not all(file.is_file() for file in files):
        raise DataError(str(path), "there is no such Parquet file, expected one, or a folder with some")
    splits = {match[1] for file in files if (match := _SPLIT.match(file.name))}
    if len(splits) > 1:
        names = ", ".join(sorted(splits))
        raise DataError(str(path), f"found files of the splits {names}, expected one, as '{path}/NAME-*.parquet'")
    return files


def _parquet_metadata(file: Path) -> Any:
    try:
        return library("pyarrow.parquet", str(file)).read_metadata(file)
    except (OSError, library("pyarrow", str(file)).ArrowException) as error:
        raise DataError(str(file), f"found no complete Parquet file ({error})") from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(str(path), f"found a file unreadable ({error})") from error


def _warn_of_large_groups(file: Path, metadata: Any) -> None:
    largest = max((metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)), default=0)
    if largest > CACHE_BYTES:
        logger.warning(
            "%s: found a row group of %d bytes, and %d are kept: each sample in random order reads one whole. "
            "Write the file with a smaller row_group_size",
            file,
            largest,
            CACHE_BYTES,
        )
