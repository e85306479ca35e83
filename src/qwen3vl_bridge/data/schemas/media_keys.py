"""Keys of a record: those that hold media, and unread ones that seem to.

Media are under "image" or "images", "video" or "videos", each one or a list, also as only base64. These count as no
media: null, "", [], {}, and lists of these. A video in a list may be a list of frames; their rate is "sample_fps", a
number, or a list of one for each video.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from qwen3vl_bridge.data.errors import DataError

BESIDE = {"image": ("image", "images"), "video": ("video", "videos")}
MEDIA_KEYS = tuple(key for keys in BESIDE.values() for key in keys)
RATE = "sample_fps"  # frames per second of a video that is a list of frames, as Qwen's message format calls it
_NAMED_AS_MEDIA = re.compile(
    r"(image|img|picture|photo|pic|video|vid|clip|audio)s?"
    r"([_ -]?(path|file|file_?name|url|uri|bytes|base64|b64|data))?s?([_ -]?\d+)?",
    re.IGNORECASE,
)
# Names of keys: with file names, which are metadata if media are read; where missing media could be; with ids of
# videos.
_NAMED_AS_FILES = re.compile(
    r"(image|img|picture|photo|pic|video|clip)s?[_ -]?(name|list|array)s?"
    r"|(screenshot|frame)s?([_ -]?(path|file|url))?s?",
    re.IGNORECASE,
)
_MAY_HOLD_MEDIA = re.compile(r".*(image|img|picture|photo|video|clip|frames).*|pics?|vids?", re.IGNORECASE)
_IDS = re.compile(r"vids?", re.IGNORECASE)
NAMES_A_SAMPLE = re.compile(r"(.*_)?(id|ID)|.*Id")
_FILE = re.compile(
    r"[^\n]{1,4096}\.(jpe?g|png|webp|gif|bmp|tiff?|heic|avif|mp4|m4v|mov|mkv|webm|avi|mpe?g|flv|wmv)(\?\S*)?",
    re.IGNORECASE,
)
_PARTS_WITH_ADDRESSES = ("image_url", "input_image", "video_url")  # types of OpenAI's
_ADDRESS = re.compile(r"https?://", re.IGNORECASE)
# Beginnings of JPEG, PNG, GIF, RIFF (WebP, AVI), TIFF, BMP, MP4 and Matroska in base64.
_ENCODED = re.compile(
    r"(/9j/|iVBORw0KGgo|R0lGOD[dl]h|UklGR|SUkqA|TU0AK|Qk[\w+/]{6}AAAA|AAAA[\w+/]{2}Z0eX|GkXfo)[\w+/\s]{40,}=*\s*",
    re.ASCII,
)


def media_beside(record: dict[str, Any], beside: str, place: str) -> dict[str, list[dict[str, Any]]]:
    """The media of each kind that are next to the messages, as parts, taken out of the record; {} without any.

    Args:
        record: as it was read.
        beside: the key of its turns, or of its question, for messages.
        place: its position in the data, for messages.

    Raises:
        DataError: both names of a kind are set, a value is not a medium, or rates that do not fit the videos.
    """
    media: dict[str, list[Any]] = {}
    for kind, keys in BESIDE.items():
        given = {key: value for key in keys if not is_none(value := record.pop(key, None))}
        if len(given) > 1:
            raise DataError(place, f"found both {' and '.join(map(repr, given))}, expected one of them")
        for key, value in given.items():
            items = value if isinstance(value, list) else [value]
            media[kind] = [_medium(item, kind, f"{place}: {key} {n}") for n, item in enumerate(items, start=1)]
    parts = {kind: [{"type": kind, kind: medium} for medium in given] for kind, given in media.items()}
    if not is_none(rates := record.pop(RATE, None)):
        _add_rates(parts.get("video", []), rates, beside, place)
    return parts


def _add_rates(videos: list[dict[str, Any]], rates: Any, beside: str, place: str) -> None:
    """Give videos that are lists of frames their rates: a list with one for each video, or one for all."""
    frames = [isinstance(video["video"], list) for video in videos]
    if not any(frames):
        raise DataError(
            place,
            f"found {RATE!r} next to {beside!r}, where no video is a list of frames, expected it in a part of a "
            f"content, or next to lists of frames under 'videos'; to ignore it, set columns.ignore=[{RATE}]",
        )
    each = rates if isinstance(rates, list) else [rates if listed else None for listed in frames]
    if len(each) != len(frames) or not all(listed or rate is None for rate, listed in zip(each, frames, strict=True)):
        raise DataError(
            place,
            f"found {shown(rates)} under {RATE!r}, expected a number for every list of frames, or a list of "
            f"{len(frames)}, one for each video, with null for one that is not a list of frames",
        )
    for video, rate in zip(videos, each, strict=True):
        video[RATE] = rate


def check_unread(record: Mapping[str, Any], known: Collection[str], messages: list[Any], place: str) -> None:
    """Refuse a key that is not read and seems to hold media, by its name or by its value.

    Ids of samples and names of files that are read are not refused; nor is a URL next to media that are read.

    Args:
        record: as it was read.
        known: keys that are read or ignored on purpose.
        messages: in our own spelling, with their media.
        place: position of the record, for messages.

    Raises:
        DataError: such a key.
    """
    unread = {key: value for key, value in record.items() if key not in known and value not in (None, "", [], {}, b"")}
    if not unread:
        return
    read = [PurePosixPath(name).parts for name in _names(record, messages)]
    shown = {part["type"] for message in messages for part in parts_of(message) if _is_medium_part(part)}
    for key, value in unread.items():
        if isinstance(value, str) and any(_is_end(PurePosixPath(value).parts, parts) for parts in read):
            continue
        like_media = _looks_like_media(value, addresses=not shown)
        if isinstance(value, str) and NAMES_A_SAMPLE.fullmatch(str(key)) and (shown or not like_media):
            continue
        if like_media or _is_named_as_media(str(key), value, shown):
            raise DataError(place, unread_media(str(key), record))
        if not shown and _has_media_within(value):
            raise DataError(
                place,
                f"found {key!r}, within which something looks like images or videos and is not read, expected media "
                f"under {', '.join(map(repr, MEDIA_KEYS))}: write them there, or leave it out (columns.ignore=[{key}])",
            )


def _is_named_as_media(key: str, value: Any, shown: Collection[str]) -> bool:
    """Whether a key's name suggests media; `shown` are the kinds that are read."""
    if not isinstance(value, (str, bytes, list, dict)):
        return False
    if not _NAMED_AS_MEDIA.fullmatch(key):
        return not shown and bool(_NAMED_AS_FILES.fullmatch(key))
    if not shown:
        return True
    return not _IDS.fullmatch(key) and not (_kind_named(key) in shown and _is_address(value))


def may_hold_media(record: Mapping[str, Any], known: Collection[str]) -> str | None:
    """The key that most likely holds missing media; None if none seems to.

    Args:
        record: as it was read.
        known: keys that are read.
    """
    values = (str, bytes, list, dict)
    unread = {str(key): value for key, value in record.items() if key not in known and isinstance(value, values)}
    like_media = [key for key, value in unread.items() if _looks_like_media(value, addresses=True)]
    named = [key for key, value in unread.items() if value and _MAY_HOLD_MEDIA.fullmatch(key)]
    return next(iter([*like_media, *named]), None)


def _has_media_within(value: Any) -> bool:
    """Whether an object or a list contains something that seems to be an image or a video."""
    if isinstance(value, list):
        return any(map(_has_media_within, value[:4]))
    if not isinstance(value, dict):
        return False
    if value.get("type") in ("image", "video", *_PARTS_WITH_ADDRESSES):
        return True
    within = {str(key): inner for key, inner in value.items() if inner not in (None, "", [], {}, b"")}
    return any(
        _is_named_as_media(key, inner, ()) or _looks_like_media(inner, addresses=True) or _has_media_within(inner)
        for key, inner in within.items()
    )


def _kind_named(key: str) -> str:
    return "video" if re.match("vid|clip", key, re.IGNORECASE) else "image"


def unread_media(key: str, keys: Collection[str]) -> str:
    """Error message for an unknown key that seems to hold media."""
    kind = _kind_named(key)
    column = re.sub(r"\d+$", "*", key)  # one of several numbered columns
    return (
        f"found {key!r}, which looks like images or videos and is not read, expected media under "
        f"{', '.join(map(repr, MEDIA_KEYS))}; the keys are {', '.join(map(str, keys))}. Name the column "
        f"(columns.{kind}={column}, or another of these), or leave it out (columns.ignore=[{key}])"
    )


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null in an object, at any depth; elements of a list are kept.

    Tables, and JSON written from them, give each object the keys of all others, with null for missing ones.
    """
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def stored(item: Any) -> Any:
    """The bytes or the path of an image as stored in Hugging Face datasets; with bytes, the path is only a name."""
    if not isinstance(item, dict) or not item:
        return item
    given = without_nulls(item)
    return given.get("bytes", given.get("path")) if set(given) <= {"bytes", "path"} else item


def local_path(name: Any, place: str) -> Any:
    """The path of a "file://" URL, with percent signs decoded; anything else unchanged.

    Raises:
        DataError: a file of another host, or a URL without a path.
    """
    if not isinstance(name, str) or name[:6].lower() != "file:/":
        return name
    try:
        address = urlsplit(name)
        path = unquote(address.path, errors="strict")
    except ValueError as error:
        raise DataError(place, f"found the URL {name[:80]!r}, expected file:///PATH ({error})") from error
    if address.netloc.lower() not in ("", "localhost"):
        raise DataError(place, f"found the URL {name[:80]!r}, a file of {address.netloc!r}, expected file:///PATH")
    if address.query or address.fragment:
        raise DataError(place, f"found the URL {name[:80]!r}, expected '?' and '#' in a path as %3F and %23")
    return path


def _medium(item: Any, kind: str, place: str) -> Any:
    """A path, a file's bytes, or a video's frames."""
    if kind == "video" and isinstance(item, list) and item:
        return [_medium(frame, "image", f"{place}, frame {number}") for number, frame in enumerate(item, start=1)]
    item = local_path(stored(item), place)
    if isinstance(item, str) and _ENCODED.fullmatch(item):
        return f"data:;base64,{''.join(item.split())}"
    if not isinstance(item, (str, bytes)) or not item:
        raise DataError(place, f"found {shown(item)}, expected a path, or bytes")
    return item


def is_none(value: Any) -> bool:
    """Whether a value means that there is no medium: null, an empty text, list or object, or a list of these."""
    if isinstance(value, dict):
        return set(without_nulls(value)) <= {"bytes", "path"} and not any(value.values())
    if isinstance(value, list):
        return not any(isinstance(item, list) or not is_none(item) for item in value)
    return value in (None, "", b"")


def parts_of(message: Any) -> list[Any]:
    """The parts of a message's content; none for a text."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else []


def _is_medium_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "video")


def _names(record: Mapping[str, Any], messages: list[Any]) -> Iterator[str]:
    """The file names of media that are read."""
    media = [part.get(part["type"]) for message in messages for part in parts_of(message) if _is_medium_part(part)]
    for value in [*media, *(record.get(key) for key in MEDIA_KEYS)]:
        for item in value if isinstance(value, list) else [value]:
            name = item.get("path") if isinstance(item, dict) else item
            if isinstance(name, str) and not name.startswith("data:"):
                yield name


def _is_end(first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    """Whether one path is the end of the other, so that both may refer to one file; A/1.png and B/1.png do not."""
    shared = min(len(first), len(second))
    return shared > 0 and first[-shared:] == second[-shared:]


def _looks_like_media(value: Any, *, addresses: bool) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_looks_like_media(item, addresses=addresses) for item in value[:4])
    if isinstance(value, dict):
        path = value.get("path")
        named = isinstance(path, str) and (set(value) == {"bytes", "path"} or bool(_FILE.fullmatch(path)))
        return set(value) <= {"bytes", "path"} and (named or _looks_like_media(value.get("bytes"), addresses=addresses))
    if isinstance(value, str):
        if _ADDRESS.match(value) and not addresses:
            return False
        named = value.startswith(("data:image/", "data:video/")) or bool(_FILE.fullmatch(value.strip()))
        return named or bool(_ENCODED.match(value[:256]))
    return isinstance(value, bytes)


def _is_address(value: Any) -> bool:
    """Whether a value is a URL, or a list of URLs."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_address, value))
    url = value.get("url") if isinstance(value, dict) and set(value) == {"url"} else value
    return isinstance(url, str) and bool(_ADDRESS.match(url))


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    words = ascii(value) if isinstance(value, bytes) else repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
