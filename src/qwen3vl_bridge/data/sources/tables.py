"""Rows of Arrow tables as conversations.

Columns are named like the keys of a record (see `data/schemas/spellings.py`) or as in the setting `columns`. Of other
columns those with texts are read, because they may contain file names, and so are objects if no column has media; those
that contain files are refused. A table has each key in every row. Null values mean missing keys, which `data/schemas`
handles, because JSON that was written from a table has them too. `messages`, `conversations` and `tools` may be strings
of JSON, or contain them if the column's type says so: contents that are either a string or a list fit no other column.
`datasets` (5.2) writes a string there as JSON, unless it is JSON by itself: the answer "7" is stored as a number, and
has to be read as the original string. A string that is itself in quotation marks is returned without them, which cannot
be detected.
"""

from __future__ import annotations

import importlib
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.images import MediaAccess
from qwen3vl_bridge.data.schemas.conversations import KEYS, PARTS, Conversation, conversation_of
from qwen3vl_bridge.data.schemas.placeholders import unread_media
from qwen3vl_bridge.data.schemas.record_schemas import Columns, NamedSchema, Schema, read_by
from qwen3vl_bridge.io.parsing import parse_record

_TEXTS = ("content", "value")  # of a message, in our spelling and ShareGPT's
_JSON_COLUMNS = ("messages", "conversations")  # and `tools`, in all schemas


def conversation_in(table: Any, row: int, place: str, media: MediaAccess, schema: Schema | None = None) -> Conversation:
    """One row of a table.

    Args:
        table: with the required columns.
        row: index of the row.
        place: the row, for messages.
        media: where its images and videos may come from.
        schema: schema of the rows, or None.

    Raises:
        DataError: a value that does not decode, or a row that is not a conversation.
    """
    record = {}
    try:
        for field in table.schema:
            value = table.column(field.name)[row].as_py()
            key = schema.key_of(field.name) if isinstance(schema, Columns) else field.name
            if key != "tools" or not isinstance(value, str):  # text is decoded later, as for other sources
                value = _plain(value, field)
            if isinstance(value, str) and key in _JSON_COLUMNS and value.strip():
                value = parse_record(value)
            record[field.name] = value
    except UnicodeDecodeError as error:
        raise DataError(place, f"found bytes that are not valid UTF-8 ({error})") from error
    except ValueError as error:
        raise DataError(place, f"found a value that does not decode ({error}), expected JSON") from error
    return conversation_of(read_by(schema, record, place), place, media)


def _plain(value: Any, field: Any) -> Any:
    """A value of an Arrow field with JSON decoded."""
    if value is None:
        return None
    kind = field.type
    if getattr(kind, "extension_name", "") == "arrow.json":
        decoded = parse_record(value)
        return value if field.name in _TEXTS and not _is_content(decoded) else decoded
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, dict):
        return {field.name: _plain(value[field.name], field) for field in kind}
    if isinstance(value, list) and hasattr(kind, "value_field"):  # a map has none
        return [_plain(inner, kind.value_field) for inner in value]
    return value


def _is_content(value: Any) -> bool:
    """Whether a value is a message's text or its parts."""
    parts = value if isinstance(value, list) and value else [None]
    return isinstance(value, str) or all(isinstance(part, dict) and part.get("type") in PARTS for part in parts)


def columns_of(table: Any, place: str, schema: Schema | None = None) -> list[str]:
    """The columns of a table that are read.

    Args:
        table: its Arrow schema.
        place: the table, for messages.
        schema: schema of the rows, or None.

    Raises:
        DataError: no column has messages, a required one is missing, or one contains files and is not read.
    """
    if isinstance(schema, NamedSchema):
        if not set(schema.keys) <= set(table.names):
            expected = " and ".join(map(repr, schema.keys))
            raise DataError(
                place, f"found the columns {', '.join(table.names)}, expected {expected} under schema {schema.name}"
            )
        return list(schema.keys)
    columns = schema or Columns()
    read = columns.columns_in(table.names, place)
    others = [field for field in table if field.name not in {*read, *columns.ignore, *KEYS}]
    for field in others:
        if _holds_files(field.type, place):
            raise DataError(place, unread_media(field.name, table.names))
    return [*read, *(field.name for field in others if _holds_text(field.type, place))]


def _holds_files(kind: Any, place: str) -> bool:
    """Whether values of an Arrow type are files' contents, as Hugging Face datasets store images."""
    types = library("pyarrow.types", place)
    kind = _item_type(kind, types)
    if types.is_struct(kind):
        return {field.name for field in kind} == {"bytes", "path"}
    return types.is_binary(kind) or types.is_large_binary(kind)


def _holds_text(kind: Any, place: str) -> bool:
    """Whether values of an Arrow type are texts, which may be names of media."""
    types = library("pyarrow.types", place)
    kind = _item_type(kind, types)
    return types.is_string(kind) or types.is_large_string(kind)


def _item_type(kind: Any, types: Any) -> Any:
    """Element type of (nested) lists of an Arrow type; any other type itself."""
    while types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    return kind


def library(name: str, place: str) -> Any:
    """A library that only these sources need, imported when one is opened.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(place, f"found no {package} ({error}), expected it installed: pip install {package}") from error
