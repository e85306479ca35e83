"""How other people spell conversations, told in our own spelling.

What lives here: ShareGPT's and LLaVA's turns, and placeholders in texts for media that stand beside them. What may not:
reading files (`data/sources/opening.py`, `data/sources/parquet.py`, `data/sources/hub.py`), checking what is a
conversation (`conversations.py`), anything but the standard library.

Our own spelling is {"messages": [{"role": ..., "content": ...}]}, with pictures and videos as parts of a content.
Others are

* {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}, with the system prompt as a
  turn or beside it, as "system";
* media beside the messages or turns: "image" or "images", "video" or "videos", each one or a list of them. Then each
  "<image>" or "<video>" in a text stands for the next of them, and so does a part {"type": "image"} without a picture
  of its own. Where no media stand beside, "<image>" and "<video>" are text like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.files.parsing import parse_record

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}
_BESIDE = {"image": ("image", "images"), "video": ("video", "videos")}
_PLACEHOLDER = re.compile("(<image>|<video>)")


def messages_of(record: Any, place: str) -> Any:
    """A record in our own spelling. What is of no spelling known here is given back as it is, for others to refuse.

    Args:
        record: as it was read; it is never changed.
        place: where it was read, for messages.

    Raises:
        DataError: turns that are none, or placeholders that don't match the media beside them.
    """
    if not isinstance(record, dict):
        return record
    # Tables and their exports give every row all keys, with null for those it has not.
    if record.get("messages") is not None and record.get("conversations") is not None:
        raise DataError(place, "found both 'messages' and 'conversations', expected one of them")
    own = dict(record)
    if own.get("conversations") is not None:
        own["messages"] = _from_turns(own.pop("conversations"), place)
    if isinstance(own.get("messages"), list):
        own["messages"] = _with_system(own["messages"], own.pop("system", None), place)
    if isinstance(own.get("tools"), str):
        own["tools"] = _decoded(own["tools"], f"{place}: 'tools'")
        if own["tools"] is None:
            del own["tools"]
    media = _media_beside(own, place)
    if media and isinstance(own.get("messages"), list):
        own["messages"] = _with_media(own["messages"], media, place)
    return own


def _from_turns(turns: Any, place: str) -> list[dict[str, Any]]:
    """ShareGPT's turns as messages."""
    if not isinstance(turns, list) or not turns:
        raise DataError(place, f"found {_shown(turns)} under 'conversations', expected a list of turns")
    return [_from_turn(turn, f"{place}: turn {number}") for number, turn in enumerate(turns, start=1)]


def _with_system(messages: list[Any], system: Any, place: str) -> list[Any]:
    """The messages after what stands beside them as a system prompt."""
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise DataError(place, f"found {_shown(system)} under 'system', expected a string")
    if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
        raise DataError(place, "found both 'system' and a turn of it, expected one of them")
    return [{"role": "system", "content": system}, *messages]


def _from_turn(turn: Any, place: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or set(turn) != {"from", "value"}:
        found = f"the keys {', '.join(map(str, turn))}" if isinstance(turn, dict) else _shown(turn)
        raise DataError(place, f"found {found}, expected an object with from and value alone")
    speaker, value = turn["from"], turn["value"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise DataError(place, f"found the speaker {_shown(speaker)}, expected one of {', '.join(SPEAKERS)}")
    if not isinstance(value, str):
        raise DataError(place, f"found {_shown(value)} as value, expected a string")
    return {"role": SPEAKERS[speaker], "content": value}


def _media_beside(record: dict[str, Any], place: str) -> dict[str, list[Any]]:
    """The media of each kind that stand beside the messages, taken out of the record; {} without any."""
    media: dict[str, list[Any]] = {}
    for kind, keys in _BESIDE.items():
        given = {key: value for key in keys if (value := record.pop(key, None)) is not None}
        if len(given) > 1:
            raise DataError(place, f"found both {' and '.join(map(repr, given))}, expected one of them")
        for key, value in given.items():
            items = value if isinstance(value, list) else [value]
            media[kind] = [_medium(item, kind, f"{place}: {key} {n}") for n, item in enumerate(items, start=1)]
    return media


def _medium(item: Any, kind: str, place: str) -> Any:
    """A path, a file's bytes, or a video's frames."""
    if kind == "video" and isinstance(item, list) and item:
        return [_medium(frame, "image", f"{place}, frame {number}") for number, frame in enumerate(item, start=1)]
    item = stored(item)
    if not isinstance(item, (str, bytes)) or not item:
        raise DataError(place, f"found {_shown(item)}, expected a path, or bytes")
    return item


def stored(item: Any) -> Any:
    """The bytes or the path of a picture as Hugging Face datasets store it; with bytes, the path is but a name."""
    if not isinstance(item, dict) or not item or not set(item) <= {"bytes", "path"}:
        return item
    return item["bytes"] if item.get("bytes") is not None else item.get("path")


def _with_media(messages: list[Any], media: dict[str, list[Any]], place: str) -> list[Any]:
    """The messages with each placeholder made the next medium of its kind."""
    for kind in _BESIDE:
        found, given = sum(_places(message, kind) for message in messages), len(media.get(kind, ()))
        if found != given:
            raise DataError(
                place,
                f"found {found} places for {kind}s ('<{kind}>' in a text, or a part without its own), "
                f"expected {given}, as many as stand beside the messages",
            )
    rest = {kind: iter(items) for kind, items in media.items()}
    return [_filled(message, rest) for message in messages]


def _places(message: Any, kind: str) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return content.count(f"<{kind}>")
    return sum(_bare(part) == kind for part in content) if isinstance(content, list) else 0


def _bare(part: Any) -> str | None:
    """The kind of a part that is a picture or a video, and does not say which."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _BESIDE:
        return None
    return kind if {key for key, value in part.items() if value is not None} <= {"type", "sample_fps"} else None


def _filled(message: Any, rest: dict[str, Iterator[Any]]) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and _PLACEHOLDER.search(content):
        pieces = [piece for piece in _PLACEHOLDER.split(content) if piece]
        return {**message, "content": [_part(piece, rest) for piece in pieces]}
    if isinstance(content, list):
        parts = [{**part, **_next(kind, rest)} if (kind := _bare(part)) else part for part in content]
        return {**message, "content": parts}
    return message


def _part(piece: str, rest: dict[str, Iterator[Any]]) -> dict[str, Any]:
    # White space beside a placeholder is text: LLaVA's own "<image>\n" was trained on with its line break.
    return _next(piece[1:-1], rest) if _PLACEHOLDER.fullmatch(piece) else {"type": "text", "text": piece}


def _next(kind: str, rest: dict[str, Iterator[Any]]) -> dict[str, Any]:
    return {"type": kind, kind: next(rest[kind])}


def _decoded(text: str, place: str) -> Any:
    """What a text says that holds JSON; None for an empty one."""
    try:
        return parse_record(text) if text.strip() else None
    except ValueError as error:
        raise DataError(place, f"found a string that is no JSON ({error}), expected a list") from error


def _shown(value: Any) -> str:
    """A value for a message, cut short."""
    shown = ascii(value) if isinstance(value, bytes) else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
