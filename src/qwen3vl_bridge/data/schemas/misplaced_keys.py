"""Keys of a record that are not read but probably meant to be: misspelt, or in the wrong place.

Most keys that are not read are metadata. These are not: "System" or "system_prompt" for "system", "functions" for
"tools", "inputs" for Alpaca's "input", "min_pixels" next to the messages instead of in an image's part.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.schemas.placeholders import NAMES_A_SAMPLE, parts_of

_OTHER_NAMES = {
    "systemprompt": "system",
    "systemmessage": "system",
    "sysprompt": "system",
    "functions": "tools",
    "chathistory": "history",
}
_ALIKE = 0.85  # similarity of two words: "sytem" and "system" are similar, "story" and "history" are not
_IN_A_MESSAGE = ("reasoning_content", "tool_calls")
_IN_A_PART = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "nframes")
# Keys of ms-swift's "objects", whose words and boxes it inserts into the text.
_OBJECT = re.compile(r"<ref-object>|<bbox>")


def check_misplaced(
    record: Mapping[str, Any], known: Collection[str], spelling: str, messages: list[Any], place: str
) -> None:
    """Refuse a key that is not read in its place, and would change what is trained on.

    Args:
        record: as it was read.
        known: keys that are read.
        spelling: the key of its turns, or of its question.
        messages: in our own spelling.
        place: position of the record, for messages.

    Raises:
        DataError: such a key.
    """
    for key, value in record.items():
        if key in known or value in (None, "", [], {}):
            continue
        meant = _meant(str(key), spelling)
        if meant is not None and _is_such(meant, value) and not _is_said(meant, value, record, messages):
            named = f"name the column (columns.{meant}={key}), or " if meant in ("system", "tools") else ""
            raise DataError(place, f"found {key!r}, which is not read, expected {meant!r}: {named}{_remedy(key)}")
        if where := _place_of(str(key), value):
            raise DataError(
                place, f"found {key!r} next to {spelling!r}, where it is not read, expected it {where}: {_remedy(key)}"
            )
    if record.get("objects") and any(_OBJECT.search(text) for message in messages for text in _texts(message)):
        raise DataError(
            place,
            "found <ref-object> or <bbox> in a text and 'objects' next to it, which is not read, expected its words "
            "and numbers in the text itself",
        )


@lru_cache(4096)
def _meant(key: str, spelling: str) -> str | None:
    """The key of ours that an unread key probably means, among those read in a record of that spelling."""
    if NAMES_A_SAMPLE.fullmatch(key):
        return None
    word = re.sub(r"[\s_-]", "", key).lower()
    asked = spelling not in ("messages", "conversations", "texts")
    ours = ["system", "tools", *(["history"] if asked else []), *(["input"] if spelling == "instruction" else [])]
    meant = _OTHER_NAMES.get(word) or next(iter(difflib.get_close_matches(word, ours, n=1, cutoff=_ALIKE)), None)
    return meant if meant in ours else None


def _is_such(meant: str, value: Any) -> bool:
    """Whether a value has the type of a key of ours."""
    if meant == "tools":
        return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))
    return isinstance(value, list if meant == "history" else str)


def _is_said(meant: str, value: Any, record: Mapping[str, Any], messages: list[Any]) -> bool:
    """Whether a record has the same value under our key, or in its messages, too."""
    if record.get(meant):
        return True
    return meant == "system" and any(value in _texts(one) for one in messages if _role(one) == "system")


def _place_of(key: str, value: Any) -> str | None:
    """Where a key that is next to the messages would be read; None for one that is not read anywhere."""
    if key in _IN_A_MESSAGE and isinstance(value, (str, list)):
        return "on an assistant's message"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if (key == "loss" and value is False) or (key == "weight" and number and 0 <= value < 1):
        return "on an assistant's message"
    return "in a part of a content, {'type': 'image', ...}" if key in _IN_A_PART and number else None


def _remedy(key: str) -> str:
    return f"change the record, or leave it out (columns.ignore=[{key}])"


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _texts(message: Any) -> list[str]:
    """The texts of a message."""
    content = message.get("content") if isinstance(message, dict) else None
    texts = [content, *(part.get("text") for part in parts_of(message) if isinstance(part, dict))]
    return [text for text in texts if isinstance(text, str)]
