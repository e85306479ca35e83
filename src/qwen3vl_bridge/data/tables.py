"""Rows of Arrow tables as conversations.

What lives here: which columns are read, and how a row becomes plain Python. What may not: finding a row (`parquet.py`,
`hub.py`), spellings (`spellings.py`).

Columns are named as the keys of a record (see `spellings.py`); others are not read. A table has each key in every row,
so a null is read as a key that is not there. `messages`, `conversations` and `tools` may be strings of JSON, or hold
them where the column's type says so: contents that are now a string, now a list, fit no other column.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from .conversations import Conversation, conversation_of
from .errors import DataError
from .spellings import messages_of, stored

COLUMNS = ("messages", "conversations", "system", "image", "images", "video", "videos", "tools")
_JSON_COLUMNS = ("messages", "conversations")  # and `tools`, whoever reads them


def conversation_in(table: Any, row: int, place: str, root: Path | None) -> Conversation:
    """One row of a table.

    Args:
        table: with the columns that are wanted.
        row: which.
        place: what messages call it.
        root: folder that paths are relative to and may not leave; None where there may be none.

    Raises:
        DataError: a value that does not decode, or a row that is no conversation.
    """
    record = {}
    try:
        for field in table.schema:
            value = _plain(table.column(field.name)[row].as_py(), field.type)
            if isinstance(value, str) and field.name in _JSON_COLUMNS and value.strip():
                value = json.loads(value)
            if value is not None:
                record[field.name] = value
    except UnicodeDecodeError as error:
        raise DataError(place, f"found bytes that are no UTF-8 ({error})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(place, f"found a value that does not decode ({error}), expected JSON") from error
    own = messages_of(record, place)
    if root is None:
        _refuse_paths(own, place)
    return conversation_of(own, place, root or Path())


def _plain(value: Any, kind: Any) -> Any:
    """A value of an Arrow type without keys that are null, and what is JSON decoded."""
    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, dict):
        plain = {field.name: _plain(value[field.name], field.type) for field in kind}
        return {key: inner for key, inner in plain.items() if inner is not None}
    return [_plain(inner, getattr(kind, "value_type", None)) for inner in value] if isinstance(value, list) else value


def _refuse_paths(record: dict[str, Any], place: str) -> None:
    """A path means nothing without a folder, and the working directory would be a guess."""
    messages = record.get("messages")
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    for part in (part for content in contents if isinstance(content, list) for part in content):
        for kind in ("image", "video"):
            medium = part.get(kind) if isinstance(part, dict) else None
            for item in medium if isinstance(medium, list) else [medium]:
                path = stored(item)
                if isinstance(path, str) and not path.startswith("data:"):
                    raise DataError(place, f"found the path {path!r}, and no media_root that it is relative to")


def columns_of(names: list[str], place: str) -> list[str]:
    """Those of a table's columns that are read.

    Raises:
        DataError: none of them holds messages.
    """
    found = [name for name in COLUMNS if name in names]
    if not {"messages", "conversations"} & set(found):
        raise DataError(place, f"found the columns {', '.join(names)}, expected 'messages' or 'conversations'")
    return found


def media_folder(given: str | Path | None, default: Path) -> Path:
    """The folder that paths are relative to.

    Raises:
        DataError: there is no such folder.
    """
    root = Path(given) if given is not None else default
    if not root.is_dir():
        raise DataError(str(root), "there is no such folder, expected the media root")
    return root


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
