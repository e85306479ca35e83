"""Read conversations from Arrow tables and Parquet files.

A table row becomes the record that a line of JSON would contain, and the schema checks the same keys. All columns are
read, except times and lists of numbers that no check needs. If a column that would not be read contains bytes, an error
is raised before any row is read.

Columns of Arrow's JSON type are decoded. `datasets` (5.2) writes a string to such a column as JSON, unless the string
is JSON by itself: the answer "7" is stored as a number, and must be read as the original string. A string that is
itself in quotation marks is returned without them, which cannot be detected.
"""

from __future__ import annotations

import hashlib
import logging
import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.files import parse_record
from qwen3vl_bridge.data.conversations import (
    DEFAULT_COLUMNS,
    Conversation,
    NamedSchema,
    Schema,
    add_schema_name,
    parse_conversation,
)
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media import MediaAccess, MediaRoot, make_media_access
from qwen3vl_bridge.data.records import KEYS, PART_KINDS, is_checked_key, unread_media_message

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

logger = logging.getLogger(__name__)

# Limits of the row groups that a process caches per source. Each data-loading worker is a process.
CACHE_BYTES, CACHE_GROUPS = 256 * 2**20, 16
_SPLIT = re.compile(r"(train|valid|val|validation|dev|test|eval)(?=[-_.])")
_TEXTS = ("content", "value")  # keys of a message for its text, in our format and in ShareGPT's
_BLOCK, _MOST_OF_TEXTS, _MOST_OF_BYTES = 2**16, 4096, 1024
_DIGEST = 64  # bytes of the longest digest, SHA-512
_TAIL = 8  # after a Parquet file's footer: its length and the format's name


def read_conversation(
    table: Any, row: int, place: str, media: MediaAccess, schema: Schema = DEFAULT_COLUMNS
) -> Conversation:
    """Return the conversation in row `row` of an Arrow table. The table contains the columns of `columns_to_read`.

    `place` is the location of the row, for messages.
    """
    record = {}
    try:
        for field in table.schema:
            value = table.column(field.name)[row].as_py()
            is_text = (
                isinstance(value, str) and schema.key_for_column(field.name) == "tools"
            )  # decoded later, with its nulls
            record[field.name] = value if is_text else _decode_json(value, field)
    except UnicodeDecodeError as error:
        raise DataError(place, f"found bytes that are not valid UTF-8 ({error})") from error
    except ValueError as error:
        raise DataError(place, f"found a value that does not decode ({error}), expected JSON") from error
    return parse_conversation(schema.convert_record(record, place), place, media)


def _decode_json(value: Any, field: Any) -> Any:
    """Return a value of an Arrow field, with JSON decoded and Arrow maps converted to objects."""
    if value is None:
        return None
    kind = field.type
    if getattr(kind, "extension_name", "") == "arrow.json":
        decoded = parse_record(value)
        if field.name not in _TEXTS or isinstance(decoded, str):
            return decoded
        # Of a message's contents only a list of parts is meant as JSON; other text may look like it.
        parts = decoded if isinstance(decoded, list) and decoded else [None]
        return decoded if all(isinstance(part, dict) and part.get("type") in PART_KINDS for part in parts) else value
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, dict):
        return {field.name: _decode_json(value[field.name], field) for field in kind}
    if types.is_map(kind):
        return {str(name): _decode_json(inner, kind.item_field) for name, inner in value}
    if isinstance(value, list) and not all(map(_is_number, _leaf_types(kind))):
        return [_decode_json(inner, kind.value_field) for inner in value]
    return value


def _leaf_types(kind: Any) -> Iterator[Any]:
    """Yield the Arrow types of the innermost values of a nested type."""
    kind = getattr(kind, "storage_type", kind)
    if types.is_dictionary(kind):
        yield from _leaf_types(kind.value_type)
    elif types.is_nested(kind):
        for number in range(kind.num_fields):
            yield from _leaf_types(kind.field(number).type)
    else:
        yield kind


def _is_number(kind: Any) -> bool:
    """Return whether values of an Arrow type are numbers, times, or bytes too short for a file, such as digests."""
    is_digest = types.is_fixed_size_binary(kind) and kind.byte_width <= _DIGEST
    return types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind) or is_digest


def _is_unchecked(field: Any, read: Collection[str]) -> bool:
    """Return whether a column has only numbers, and neither a sample (columns `read`) nor a check depends on them."""
    return field.name not in read and not is_checked_key(field.name) and all(map(_is_number, _leaf_types(field.type)))


def columns_to_read(table: Any, place: str, schema: Schema = DEFAULT_COLUMNS) -> list[str]:
    """Return the names of the columns to read, in the order of the Arrow schema `table`.

    Raises:
        DataError: a required column is missing, or a column that would not be read contains bytes.
    """
    read = schema.columns_to_read(table.names, place)
    if isinstance(schema, NamedSchema):
        return read
    others = [field for field in table if field.name not in {*read, *schema.ignore, *KEYS}]
    for field in others:
        if any(map(_is_bytes, _leaf_types(field.type))):
            raise DataError(place, unread_media_message(field.name, table.names))
    # A number is read for messages, which list the keys of a record; many of them, such as an embedding, take too long.
    skipped = [
        field
        for field in others
        if _is_unchecked(field, read) and (types.is_nested(field.type) or types.is_temporal(field.type))
    ]
    names = {*read, *(field.name for field in others)} - {field.name for field in skipped}
    return [name for name in table.names if name in names]


def _is_bytes(kind: Any) -> bool:
    return (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or (types.is_fixed_size_binary(kind) and kind.byte_width > _DIGEST)
    )


class Parquet:
    """The conversations in the rows of Parquet files.

    Random access reads a full row group, so files with small row groups are faster to shuffle. Folders written by
    `save_to_disk` of Hugging Face's `datasets` have no row groups, and are faster still.
    """

    def __init__(self, path: str | Path, media_root: MediaRoot = None, schema: Schema = DEFAULT_COLUMNS) -> None:
        """Read the offsets of the rows, and compute a hash of the contents of the files, in the order of their names.

        Args:
            path: a file, a folder of files, or a pattern such as "data/train-*.parquet".
            media_root: folder of images and videos; None for the folder of the files.

        Raises:
            DataError: a file is not complete, there are no messages or rows, or the files are of several splits.
        """
        self.path, self._schema = Path(path), schema
        self._files = _parquet_files(self.path)
        media = make_media_access(media_root, self._files[0].parent)
        self._columns: list[list[str]] = []
        # The first row and the first row group of each file, and the first row of each row group.
        self._first_rows, self._first_groups, self._starts, self._len = array("Q"), array("Q"), array("Q"), 0
        digest = hashlib.sha256()
        texts, contents = array("Q"), array("Q")  # see `_sample_blocks`
        for number, file in enumerate(self._files):
            try:
                metadata = pq.read_metadata(file)
                with file.open("rb") as opened:
                    opened.seek(-(metadata.serialized_size + _TAIL), 2)
                    digest.update(opened.read())
            except (OSError, pa.ArrowException) as error:
                raise DataError(str(file), f"found no complete Parquet file ({error})") from error
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            arrow = metadata.schema.to_arrow_schema()
            self._columns.append(columns_to_read(arrow, str(file), schema))
            # Numbers that no sample depends on may change without a change of the fingerprint.
            read = schema.columns_to_read(arrow.names, str(file))
            hashed = {name for name in self._columns[number] if not _is_unchecked(arrow.field(name), read)}
            self._first_rows.append(self._len)
            self._first_groups.append(len(self._starts))
            for group in groups:
                self._starts.append(self._len)
                self._len += group.num_rows
            for leaf in range(metadata.num_columns):
                column = metadata.schema.column(leaf)
                if column.path.partition(".")[0] in hashed:
                    raw = column.physical_type == "BYTE_ARRAY" and column.logical_type.type == "NONE"
                    for chunk in (group.column(leaf) for group in groups):
                        pages = (chunk.dictionary_page_offset, chunk.data_page_offset)
                        start = min(page for page in pages if page is not None)
                        (contents if raw else texts).extend((number, start, chunk.total_compressed_size))
            if (largest := max((group.total_byte_size for group in groups), default=0)) > CACHE_BYTES:
                text = (
                    "%s: found a row group of %d bytes; at most %d bytes are cached, so each sample in random order "
                    "reads a "
                    "full row group. Write the file with a smaller row_group_size"
                )
                logger.warning(text, file, largest, CACHE_BYTES)
        if not self._len:
            raise DataError(str(self.path), "found no rows, expected one conversation a row")
        try:
            for chunks, most in ((texts, _MOST_OF_TEXTS), (contents, _MOST_OF_BYTES)):
                for block in _sample_blocks(self._files, chunks, most):
                    digest.update(block)
        except OSError as error:
            raise DataError(str(self.path), f"cannot read a file ({error})") from error
        self.download_key = add_schema_name(f"{self._len} rows, {digest.hexdigest()[:16]}", schema)
        self.media = media.for_data(self.download_key)
        self._cache: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    def __len__(self) -> int:
        return self._len

    def sample_id(self, index: int) -> str:
        """Return the name of the file and the index of the row in the file."""
        row = range(len(self))[index]
        file = bisect_right(self._first_rows, row) - 1
        return f"{self._files[file].name}[{row - self._first_rows[file]}]"

    def fingerprint(self) -> str:
        """Return a text that identifies the data: number of rows, and hashes of files and of URLs not downloaded."""
        return self.media.add_missing_urls(self.download_key)

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation."""
        place, row = self.sample_id(index), range(len(self))[index]
        number = bisect_right(self._starts, row) - 1  # the last group that starts there: earlier ones are empty
        table = self._cache.pop(number, None)
        if table is None:
            file = bisect_right(self._first_groups, number) - 1
            group = number - self._first_groups[file]
            try:
                # Opened again for each read: forked workers would share an open file and its position.
                with pq.ParquetFile(self._files[file]) as opened:
                    table = opened.read_row_group(group, columns=self._columns[file], use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise DataError(place, f"cannot read row group {group} ({error})") from error
        self._cache[number] = table  # the most recently used is last
        while len(self._cache) > 1 and (
            len(self._cache) > CACHE_GROUPS or sum(kept.nbytes for kept in self._cache.values()) > CACHE_BYTES
        ):
            del self._cache[next(iter(self._cache))]
        return read_conversation(table, row - self._starts[number], place, self.media, self._schema)


def _parquet_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
    else:
        files = sorted(path.parent.glob(path.name)) if "*" in path.name else [path]
    if not files or not all(file.is_file() for file in files):
        raise DataError(str(path), "there is no such Parquet file, and no folder with Parquet files")
    splits = {match[1] for file in files if (match := _SPLIT.match(file.name))}
    if len(splits) > 1:
        names = ", ".join(sorted(splits))
        raise DataError(str(path), f"found files of the splits {names}; choose one with '{path}/NAME-*.parquet'")
    return files


def _sample_blocks(files: Sequence[Path], chunks: Sequence[int], most: int) -> Iterator[bytes]:
    """Yield blocks of 64 KiB of the given column chunks: all blocks, or `most` of them, evenly spread.

    `chunks` has three numbers for each column of a row group: the index of its file, its offset there, and its length.
    """
    ends = array("Q", accumulate(-(-length // _BLOCK) for length in chunks[2::3]))
    total = ends[-1] if ends else 0
    wanted = min(total, most)

    def located(place: int) -> tuple[int, int, int]:
        """Return the file index, offset and length of the block that is yielded at position `place`."""
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
