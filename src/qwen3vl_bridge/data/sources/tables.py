"""Conversations in Arrow tables and Parquet files.

Columns are named like the keys of a record or as in the setting `columns`. Of other columns those with texts are read,
because they may contain file names; those that contain files are refused. `messages`, `conversations` and `tools` may
be strings of JSON, or contain them if the column's type says so: `datasets` (5.2) writes a string there as JSON, unless
it is JSON by itself: the answer "7" is stored as a number, and has to be read as the original string. A string that is
itself in quotation marks is returned without them, which cannot be detected.
"""

from __future__ import annotations

import hashlib
import logging
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.media_access import MediaAccess, MediaRoot, media_access
from qwen3vl_bridge.data.schemas.conversations import KEYS, PARTS, Conversation, conversation_of
from qwen3vl_bridge.data.schemas.placeholders import unread_media
from qwen3vl_bridge.data.schemas.record_schemas import OURS, NamedSchema, Schema, marked
from qwen3vl_bridge.io.parsing import parse_record

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

logger = logging.getLogger(__name__)

# Row groups of a source that one process keeps. Each data-loading worker is a process.
CACHE_BYTES, CACHE_GROUPS = 256 * 2**20, 16
_SPLIT = re.compile(r"(train|valid|val|validation|dev|test|eval)(?=[-_.])")
_TEXTS = ("content", "value")  # of a message, in our spelling and ShareGPT's
_JSON_COLUMNS = ("messages", "conversations")  # and `tools`, in all schemas
_BLOCK, _MOST_OF_TEXTS, _MOST_OF_BYTES = 2**16, 4096, 1024
_TAIL = 8  # after a Parquet file's footer: its length and the format's name


def conversation_in(table: Any, row: int, place: str, media: MediaAccess, schema: Schema = OURS) -> Conversation:
    """The row of a table that messages call `place`; the table has the columns of `columns_of`."""
    record = {}
    try:
        for field in table.schema:
            value = table.column(field.name)[row].as_py()
            key = schema.key_of(field.name)
            if key != "tools" or not isinstance(value, str):  # text is decoded later, as for other sources
                value = _decoded_json(value, field)
            if isinstance(value, str) and key in _JSON_COLUMNS and value.strip():
                value = parse_record(value)
            record[field.name] = value
    except UnicodeDecodeError as error:
        raise DataError(place, f"found bytes that are not valid UTF-8 ({error})") from error
    except ValueError as error:
        raise DataError(place, f"found a value that does not decode ({error}), expected JSON") from error
    return conversation_of(schema.messages_of(record, place), place, media)


def _decoded_json(value: Any, field: Any) -> Any:
    """A value of an Arrow field with JSON decoded."""
    if value is None:
        return None
    kind = field.type
    if getattr(kind, "extension_name", "") == "arrow.json":
        decoded = parse_record(value)
        if field.name not in _TEXTS or isinstance(decoded, str):
            return decoded
        # Of a message's contents only a list of parts is meant as JSON; other text may look like it.
        parts = decoded if isinstance(decoded, list) and decoded else [None]
        return decoded if all(isinstance(part, dict) and part.get("type") in PARTS for part in parts) else value
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, dict):
        return {field.name: _decoded_json(value[field.name], field) for field in kind}
    if isinstance(value, list) and hasattr(kind, "value_field"):  # a map has none
        return [_decoded_json(inner, kind.value_field) for inner in value]
    return value


def columns_of(table: Any, place: str, schema: Schema = OURS) -> list[str]:
    """The columns of an Arrow schema that are read; a `DataError` if one with messages or a required one is missing, or
    one contains files and is not read.
    """
    read = schema.columns_in(table.names, place)
    if isinstance(schema, NamedSchema):
        return read
    others = [field for field in table if field.name not in {*read, *schema.ignore, *KEYS}]
    for field in others:
        kind = field.type
        while types.is_list(kind) or types.is_large_list(kind):
            kind = kind.value_type
        # As Hugging Face datasets store images.
        is_file = types.is_struct(kind) and {inner.name for inner in kind} == {"bytes", "path"}
        if is_file or types.is_binary(kind) or types.is_large_binary(kind):
            raise DataError(place, unread_media(field.name, table.names))
        if types.is_string(kind) or types.is_large_string(kind):
            read.append(field.name)
    return read


class Parquet:
    """Rows of Parquet files.

    Random access reads a whole row group, so files with small ones are faster to shuffle; folders written by
    `save_to_disk` of Hugging Face's `datasets` have no row groups, and are faster still.
    """

    def __init__(self, path: str | Path, media_root: MediaRoot = None, schema: Schema = OURS) -> None:
        """Read the offsets of rows, and a digest of the files (see `_blocks`), which are ordered by name.

        `path` is a file, a folder of them, or a pattern such as "data/train-*.parquet"; `media_root` is the files' own
        folder by default. A `DataError` for no complete Parquet file, or no messages or rows; files of several splits.
        """
        self.path, self._schema = Path(path), schema
        self._files = _parquet_files(self.path)
        media = media_access(media_root, self._files[0].parent)
        self._columns: list[list[str]] = []
        # The first row and the first row group of each file, and the first row of each row group.
        self._first_rows, self._first_groups, self._starts, self._len = array("Q"), array("Q"), array("Q"), 0
        digest = hashlib.sha256()
        texts, contents = array("Q"), array("Q")  # see `_blocks`
        for number, file in enumerate(self._files):
            try:
                metadata = pq.read_metadata(file)
                with file.open("rb") as opened:
                    opened.seek(-(metadata.serialized_size + _TAIL), 2)
                    digest.update(opened.read())
            except (OSError, pa.ArrowException) as error:
                raise DataError(str(file), f"found no complete Parquet file ({error})") from error
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            self._columns.append(columns_of(metadata.schema.to_arrow_schema(), str(file), schema))
            self._first_rows.append(self._len)
            self._first_groups.append(len(self._starts))
            for group in groups:
                self._starts.append(self._len)
                self._len += group.num_rows
            for leaf in range(metadata.num_columns):
                column = metadata.schema.column(leaf)
                if column.path.partition(".")[0] in self._columns[number]:
                    raw = column.physical_type == "BYTE_ARRAY" and column.logical_type.type == "NONE"
                    for chunk in (group.column(leaf) for group in groups):
                        pages = (chunk.dictionary_page_offset, chunk.data_page_offset)
                        start = min(page for page in pages if page is not None)
                        (contents if raw else texts).extend((number, start, chunk.total_compressed_size))
            if (largest := max((group.total_byte_size for group in groups), default=0)) > CACHE_BYTES:
                text = (
                    "%s: found a row group of %d bytes, and %d are kept: each sample in random order reads one whole. "
                    "Write the file with a smaller row_group_size"
                )
                logger.warning(text, file, largest, CACHE_BYTES)
        if not self._len:
            raise DataError(str(self.path), "found no rows, expected one conversation a row")
        try:
            for chunks, most in ((texts, _MOST_OF_TEXTS), (contents, _MOST_OF_BYTES)):
                for block in _blocks(self._files, chunks, most):
                    digest.update(block)
        except OSError as error:
            raise DataError(str(self.path), f"found a file unreadable ({error})") from error
        self.recorded_as = marked(f"{self._len} rows, {digest.hexdigest()[:16]}", schema)
        self.media = media.of_data(self.recorded_as)
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
        """Number of rows, a digest of the files, in order, and the files that were not downloaded."""
        return self.media.mark(self.recorded_as, str(self.path))

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation."""
        place, row = self.sample_id(index), range(len(self))[index]
        number = bisect_right(self._starts, row) - 1  # the last of those that start here: the others are empty
        table = self._cache.pop(number, None)
        if table is None:
            file = bisect_right(self._first_groups, number) - 1
            group = number - self._first_groups[file]
            try:
                # Opened again for each read: forked workers would share an open file and its position.
                with pq.ParquetFile(self._files[file]) as opened:
                    table = opened.read_row_group(group, columns=self._columns[file], use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise DataError(place, f"found row group {group} unreadable ({error})") from error
        self._cache[number] = table  # the most recently used is last
        while len(self._cache) > 1 and (
            len(self._cache) > CACHE_GROUPS or sum(kept.nbytes for kept in self._cache.values()) > CACHE_BYTES
        ):
            del self._cache[next(iter(self._cache))]
        return conversation_in(table, row - self._starts[number], place, self.media, self._schema)


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


def _blocks(files: Sequence[Path], chunks: Sequence[int], most: int) -> Iterator[bytes]:
    """Blocks of 64 KiB of some columns, each of one row group: all, or `most` of them, evenly spread.

    `chunks` has three numbers for each column of a row group: the index of its file, its offset there, and its length.
    Texts determine what a sample is, and are a small part of files with images. So a digest has every footer (offset,
    size, minimum and maximum of each column of each row group), up to 4096 blocks of the texts that are read, and up to
    1024 of columns of bytes, which are images. If there are more, a change that alters no footer is detected with
    probability 4096 / (number of text blocks). Nothing depends on names, folders or times of files, which differ
    between machines. The cost is bounded: 5120 reads, half a minute from a network disk with 5 ms per read.
    """
    ends = array("Q", accumulate(-(-length // _BLOCK) for length in chunks[2::3]))
    total = ends[-1] if ends else 0
    wanted = min(total, most)

    def located(place: int) -> tuple[int, int, int]:
        """File, offset and length of a block."""
        block = place * total // wanted
        number = bisect_right(ends, block)
        file, start, length = chunks[3 * number : 3 * number + 3]
        inside = (block - ends[number] + -(-length // _BLOCK)) * _BLOCK
        return file, start + inside, min(_BLOCK, length - inside)

    for file, blocks in groupby(map(located, range(wanted)), key=itemgetter(0)):  # in order, so each opens once
        with files[file].open("rb", buffering=0) as opened:
            for _, start, length in blocks:
                opened.seek(start)
                yield opened.read(length)
