"""Pictures and videos that stand beside a conversation: their places in it, and keys that seem to hold some.

What lives here: which keys hold media, "<image>" and "<video>" in texts, how many of them there must be. What may not:
how turns are spelt (`spellings.py`), opening media (`data/media/images.py`), anything but the standard library.

Media stand under "image" or "images", "video" or "videos", each one or a list of them. Each "<image>" or "<video>" in a
text stands for the next of them, and so does a part {"type": "image"} without a picture of its own. In a content that
is a list of parts, a text is text. There are as many places as media, or a record is refused: also one without media,
whose "<image>" would be trained on as the letters it is spelt with.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from qwen3vl_bridge.data.errors import DataError

Placeholders = Literal["media", "text"]

LIMITS = ("min_pixels", "max_pixels")  # of a picture's own, beside it
BESIDE = {"image": ("image", "images"), "video": ("video", "videos")}
MEDIA_KEYS = tuple(key for keys in BESIDE.values() for key in keys)
_PLACEHOLDER = re.compile("(<image>|<video>)")
_NAMED_AS_MEDIA = re.compile(
    r"(image|img|picture|photo|pic|video|vid|clip|audio)s?"
    r"([_ -]?(path|file|file_?name|url|uri|bytes|base64|b64|data))?s?([_ -]?\d+)?",
    re.IGNORECASE,
)
_NAMES_A_SAMPLE = re.compile(r"(.*_)?(id|ID)|.*Id")
_FILE = re.compile(
    r"[^\n]{1,4096}\.(jpe?g|png|webp|gif|bmp|tiff?|heic|avif|mp4|m4v|mov|mkv|webm|avi|mpe?g|flv|wmv)(\?\S*)?",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"https?://", re.IGNORECASE)


def media_beside(record: dict[str, Any], place: str) -> dict[str, list[Any]]:
    """The media of each kind that stand beside the messages, taken out of the record; {} without any.

    Raises:
        DataError: both names of a kind, or what is no medium.
    """
    media: dict[str, list[Any]] = {}
    for kind, keys in BESIDE.items():
        given = {key: value for key in keys if (value := record.pop(key, None)) is not None}
        if len(given) > 1:
            raise DataError(place, f"found both {' and '.join(map(repr, given))}, expected one of them")
        for key, value in given.items():
            items = value if isinstance(value, list) else [value]
            media[kind] = [_medium(item, kind, f"{place}: {key} {n}") for n, item in enumerate(items, start=1)]
    return media


def with_media(
    messages: list[Any],
    media: Mapping[str, list[Any]],
    place: str,
    *,
    keys: Collection[str],
    placeholders: Placeholders = "media",
    in_front: bool = False,
) -> list[Any]:
    """The messages with each place made the next medium of its kind.

    Args:
        messages: they.
        media: of each kind, in their order.
        place: where the record stands, for messages.
        keys: of the record, for messages.
        placeholders: whether "<image>" and "<video>" in a text are places, or text.
        in_front: media of a kind for which there is no place at all stand before the first question.

    Raises:
        DataError: not as many places of a kind as media.
    """
    front = []
    for kind in BESIDE:
        found, given = sum(_places(message, kind, placeholders) for message in messages), media.get(kind, ())
        if in_front and not found:
            front += [{"type": kind, kind: medium} for medium in given]
        elif found != len(given):
            raise DataError(place, _mismatch(kind, found, len(given), keys, placeholders))
    if not any(media.values()):
        return messages
    front_kinds = {part["type"] for part in front}
    rest = {kind: iter(items) for kind, items in media.items() if kind not in front_kinds}
    filled = [_filled(message, rest, placeholders) for message in messages]
    return _before_the_first_question(filled, front) if front else filled


def _mismatch(kind: str, found: int, given: int, keys: Collection[str], placeholders: Placeholders) -> str:
    words = f"'<{kind}>' in a text, or a part without its own" if placeholders == "media" else "parts without their own"
    problem = (
        f"found {found} places for {kind}s ({words}), expected {given}, as many as stand beside the messages; the keys "
        f"are {', '.join(map(str, keys))}"
    )
    if given:
        return problem
    return (
        f"{problem}. Name the one that holds them (columns.{kind}=KEY); where '<{kind}>' is meant as text, set "
        "columns.placeholders=text, or write the content as a list of parts"
    )


def check_unread(record: Mapping[str, Any], known: Collection[str], messages: list[Any], place: str) -> None:
    """Refuse a key that nobody reads and that seems to hold media, by its name or by its value.

    What only names a sample, or again a file that is read, is none; nor is an address beside media that are read.

    Args:
        record: as it was read.
        known: keys that are read, or that are said to be left out.
        messages: in our own spelling, with their media.
        place: where the record stands, for messages.

    Raises:
        DataError: such a key.
    """
    unread = {key: value for key, value in record.items() if key not in known and value not in (None, "", [], {}, b"")}
    if not unread:
        return
    read = [PurePosixPath(name).parts for name in _names(record, messages)]
    shown = any(_is_medium_part(part) for message in messages for part in _parts(message))
    for key, value in unread.items():
        if isinstance(value, str) and any(_is_end(PurePosixPath(value).parts, parts) for parts in read):
            continue
        like_media = _looks_like_media(value, addresses=not shown)
        if isinstance(value, str) and _NAMES_A_SAMPLE.fullmatch(str(key)) and (shown or not like_media):
            continue
        named = bool(_NAMED_AS_MEDIA.fullmatch(str(key))) and isinstance(value, (str, bytes, list, dict))
        if named or like_media:
            raise DataError(place, unread_media(str(key), record))


def unread_media(key: str, keys: Collection[str]) -> str:
    """What is wrong with a key that seems to hold media and is none of ours."""
    kind = "video" if re.match("vid|clip", key, re.IGNORECASE) else "image"
    return (
        f"found {key!r}, which looks like pictures or videos and is not read, expected media under "
        f"{', '.join(map(repr, MEDIA_KEYS))}; the keys are {', '.join(map(str, keys))}. Name the column "
        f"(columns.{kind}={key}, or another of these), or leave it out (columns.ignore=[{key}])"
    )


def stored(item: Any) -> Any:
    """The bytes or the path of a picture as Hugging Face datasets store it; with bytes, the path is but a name."""
    if not isinstance(item, dict) or not item or not set(item) <= {"bytes", "path"}:
        return item
    return item["bytes"] if item.get("bytes") is not None else item.get("path")


def local_path(name: Any, place: str) -> Any:
    """The path that a "file://" address means, percent signs decoded; anything else as it is.

    Raises:
        DataError: a file of another host, or an address that is no path.
    """
    if not isinstance(name, str) or name[:6].lower() != "file:/":
        return name
    try:
        address = urlsplit(name)
        path = unquote(address.path, errors="strict")
    except ValueError as error:
        raise DataError(place, f"found the address {name[:80]!r}, expected file:///PATH ({error})") from error
    if address.netloc.lower() not in ("", "localhost"):
        raise DataError(place, f"found the address {name[:80]!r}, a file of {address.netloc!r}, expected file:///PATH")
    if address.query or address.fragment:
        raise DataError(place, f"found the address {name[:80]!r}, expected '?' and '#' in a path as %3F and %23")
    return path


def _medium(item: Any, kind: str, place: str) -> Any:
    """A path, a file's bytes, or a video's frames."""
    if kind == "video" and isinstance(item, list) and item:
        return [_medium(frame, "image", f"{place}, frame {number}") for number, frame in enumerate(item, start=1)]
    item = local_path(stored(item), place)
    if not isinstance(item, (str, bytes)) or not item:
        raise DataError(place, f"found {shown(item)}, expected a path, or bytes")
    return item


def _places(message: Any, kind: str, placeholders: Placeholders) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return content.count(f"<{kind}>") if placeholders == "media" else 0
    return sum(_bare(part) == kind for part in content) if isinstance(content, list) else 0


def _bare(part: Any) -> str | None:
    """The kind of a part that is a picture or a video, and does not say which."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in BESIDE:
        return None
    return (
        kind if {key for key, value in part.items() if value is not None} <= {"type", "sample_fps", *LIMITS} else None
    )


def _filled(message: Any, rest: dict[str, Iterator[Any]], placeholders: Placeholders) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and placeholders == "media" and _PLACEHOLDER.search(content):
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


def _before_the_first_question(messages: list[Any], parts: list[dict[str, Any]]) -> list[Any]:
    at = next(number for number, message in enumerate(messages) if message["role"] == "user")
    content = messages[at]["content"]
    content = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return [*messages[:at], {**messages[at], "content": [*parts, *content]}, *messages[at + 1 :]]


def _parts(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else []


def _is_medium_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "video")


def _names(record: Mapping[str, Any], messages: list[Any]) -> Iterator[str]:
    """What media that are read are called."""
    media = [part.get(part["type"]) for message in messages for part in _parts(message) if _is_medium_part(part)]
    for value in [*media, *(record.get(key) for key in MEDIA_KEYS)]:
        for item in value if isinstance(value, list) else [value]:
            name = item.get("path") if isinstance(item, dict) else item
            if isinstance(name, str) and not name.startswith("data:"):
                yield name


def _is_end(first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    """Whether one path is the end of the other, so that both may be of one file; A/1.png and B/1.png are two."""
    shared = min(len(first), len(second))
    return shared > 0 and first[-shared:] == second[-shared:]


def _looks_like_media(value: Any, *, addresses: bool) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_looks_like_media(item, addresses=addresses) for item in value[:4])
    if isinstance(value, dict):
        path = value.get("path")
        named = isinstance(path, str) and (set(value) == {"bytes", "path"} or bool(_FILE.fullmatch(path)))
        return set(value) <= {"bytes", "path"} and (named or isinstance(value.get("bytes"), bytes))
    if isinstance(value, str):
        if _ADDRESS.match(value) and not addresses:
            return False
        return value.startswith(("data:image/", "data:video/")) or bool(_FILE.fullmatch(value.strip()))
    return isinstance(value, bytes)


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    words = ascii(value) if isinstance(value, bytes) else repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
