"""Images and videos next to the messages of a record, and the placeholders in its texts that they replace.

Media are under "image" or "images", "video" or "videos", each one or a list; a video in a list may be a list of frames.
Each "<image>" or "<video>" in a text stands for the next of them, and so does a part {"type": "image"} without an image
of its own. In a content that is a list of parts, a text is literal. Of the other spellings (docs/data.md) a record may
use only one, and only in questions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from qwen3vl_bridge.data.errors import DataError

Placeholders = Literal["media", "text"]

KEYS_OF_KIND = {"image": ("image", "images"), "video": ("video", "videos")}
MEDIA_KEYS = tuple(key for keys in KEYS_OF_KIND.values() for key in keys)
RATE = "sample_fps"  # frames per second of a video that is a list of frames, as Qwen's message format calls it
LIMITS = ("min_pixels", "max_pixels")  # of an image, in its part of a content
_EMPTY = (None, "", [], {}, b"")
_OURS = ("<image>", "<video>")
_PLACEHOLDER = re.compile(
    r"<img>(?P<path>[^<>\n]{0,4096})</img>"
    r"|<(?P<bar>\|)?(?P<kind>image|img|video)([ _-]?(?P<number>\d{1,4})|here|[ _-]?placeholder)?(?(bar)\|)>",
    re.IGNORECASE,
)
_AS_TEXT = "where text is meant, write the content as a list of parts, or set columns.placeholders=text"
# Names of keys that hold media, and those of ids, which may look like file names.
_NAMED_AS_MEDIA = re.compile(
    r"(image|img|picture|photo|pic|video|clip|audio)s?"
    r"([_ -]?(path|file|file_?name|url|uri|bytes|base64|b64|data))?s?([_ -]?\d+)?",
    re.IGNORECASE,
)
_NAMED_AS_ID = re.compile(r"(.*_)?(id|ID)|.*Id")
_FILE = re.compile(
    r"[^\n]{1,4096}\.(jpe?g|png|webp|gif|bmp|tiff?|heic|avif|mp4|m4v|mov|mkv|webm|avi|mpe?g|flv|wmv)(\?\S*)?",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"https?://", re.IGNORECASE)
# Beginnings of JPEG, PNG, GIF, RIFF (WebP, AVI), TIFF, BMP, MP4 and Matroska in base64.
_ENCODED = re.compile(
    r"(/9j/|iVBORw0KGgo|R0lGOD[dl]h|UklGR|SUkqA|TU0AK|Qk[\w+/]{6}AAAA|AAAA[\w+/]{2}Z0eX|GkXfo)[\w+/\s]{40,}=*\s*",
    re.ASCII,
)


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    words = ascii(value) if isinstance(value, bytes) else repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null in an object, at any depth; elements of a list are kept."""
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
    """The path of a "file://" URL (of this host, else `DataError`), percent signs decoded; anything else unchanged."""
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


def is_none(value: Any) -> bool:
    """Whether a value means that there is no medium: null, an empty text, list or object, or a list of these."""
    if isinstance(value, dict):
        return set(without_nulls(value)) <= {"bytes", "path"} and not any(value.values())
    if isinstance(value, list):
        return not any(isinstance(item, list) or not is_none(item) for item in value)
    return value in (None, "", b"")


def pop_media(record: dict[str, Any], place: str) -> dict[str, list[dict[str, Any]]]:
    """The media of each kind that are next to the messages, as parts, taken out of the record; {} without any.

    Raises:
        DataError: both names of a kind are set, a value is not a medium, or rates that do not fit the videos.
    """
    media: dict[str, list[dict[str, Any]]] = {}
    for kind, keys in KEYS_OF_KIND.items():
        given = {key: value for key in keys if not is_none(value := record.pop(key, None))}
        if len(given) > 1:
            raise DataError(place, f"found both {' and '.join(map(repr, given))}, expected one of them")
        for key, value in given.items():
            items = enumerate(value if isinstance(value, list) else [value], start=1)
            media[kind] = [{"type": kind, kind: _medium(item, kind, f"{place}: {key} {n}")} for n, item in items]
    if is_none(rates := record.pop(RATE, None)):
        return media
    videos = media.get("video", [])
    are_frames = [isinstance(video["video"], list) for video in videos]
    each = rates if isinstance(rates, list) else [rates if frames else None for frames in are_frames]
    if (
        not any(are_frames)
        or len(each) != len(videos)
        or any(rate is not None and not frames for rate, frames in zip(each, are_frames, strict=True))
    ):
        raise DataError(
            place,
            f"found {shown(rates)} under {RATE!r} next to {sum(are_frames)} videos that are lists of frames, expected "
            f"a number for every list of frames, or a list of {len(videos)}, one for each video, with null for "
            f"one that is not a list of frames; to ignore it, set columns.ignore=[{RATE}]",
        )
    for video, rate in zip(videos, each, strict=True):
        video[RATE] = rate
    return media


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


def check_unread(record: Mapping[str, Any], known: Collection[str], messages: list[Any], place: str) -> None:
    """Refuse a key that is not read and seems to hold media, by its name or by its value.

    Not refused are other names of files that are read, and, next to media that are read, ids and URLs. `messages` are
    in our own spelling, with their media; `known` are keys that are read or ignored on purpose.
    """
    unread = {key: value for key, value in record.items() if key not in known and value not in _EMPTY}
    if not unread:
        return
    media = [part for message in messages for part in _parts_of(message) if _kind_of(part)]
    read = [PurePosixPath(name).parts for name in _file_names(record, media)]
    for key, value in unread.items():
        # One path that is the end of another may be the same file; A/1.png and B/1.png are not.
        parts = PurePosixPath(value).parts if isinstance(value, str) else ()
        if parts and any(other and parts[-len(other) :] == other[-len(parts) :] for other in read):
            continue
        seems_media = _looks_like_media(value, addresses=not media)
        if isinstance(value, str) and _NAMED_AS_ID.fullmatch(str(key)) and (media or not seems_media):
            continue
        named = isinstance(value, (str, bytes, list, dict)) and _NAMED_AS_MEDIA.fullmatch(str(key))
        if named and _is_address(value) and any(part["type"] == _kind_named(str(key)) for part in media):
            continue
        if seems_media or named:
            raise DataError(place, unread_media(str(key), record))


def unread_media(key: str, keys: Collection[str]) -> str:
    """Error message for a key that is not read and seems to hold media."""
    column = re.sub(r"\d+$", "*", key)  # one of several numbered columns
    return (
        f"found {key!r}, which looks like images or videos and is not read, expected media under "
        f"{', '.join(map(repr, MEDIA_KEYS))}; the keys are {', '.join(map(str, keys))}. Name the column "
        f"(columns.{_kind_named(key)}={column}, or another of these), or leave it out (columns.ignore=[{key}])"
    )


def _kind_named(key: str) -> str:
    return "video" if re.match("vid|clip", key, re.IGNORECASE) else "image"


def _file_names(record: Mapping[str, Any], media: list[Any]) -> Iterator[str]:
    """The file names of media that are read."""
    for value in [*(part.get(part["type"]) for part in media), *(record.get(key) for key in MEDIA_KEYS)]:
        for item in value if isinstance(value, list) else [value]:
            name = item.get("path") if isinstance(item, dict) else item
            if isinstance(name, str) and not name.startswith("data:"):
                yield name


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


class _Placeholder(NamedTuple):
    """A placeholder for the next image or video, or for that of a number or a path."""

    kind: str
    spelling: str | None = None  # None for a part without a medium of its own
    number: int | None = None
    path: str | None = None


def with_media(
    messages: list[Any],
    media: Mapping[str, list[dict[str, Any]]],
    place: str,
    *,
    keys: Collection[str],
    placeholders: Placeholders = "media",
    in_front: bool = False,
) -> list[Any]:
    """The messages with each placeholder replaced by its medium; `media` are parts, of each kind in order.

    With `in_front`, media of a kind without any placeholder are inserted before the first question.

    Raises:
        DataError: another number of placeholders of a kind than media, or ambiguous placeholders.
    """
    all_found = [one for message in messages for one in _placeholders_in(message, placeholders)]
    front = []
    for kind in KEYS_OF_KIND:
        found, given = [one for one in all_found if one.kind == kind], media.get(kind, [])
        if in_front and not found:
            front += given
            continue
        _check_spellings(kind, found, messages, place)
        numbers = {one.number for one in found if one.number is not None}
        if given and numbers and numbers != set(range(1, len(given) + 1)):
            raise DataError(
                place,
                f"found placeholders for the {kind}s of the numbers {', '.join(map(str, sorted(numbers)))}, expected "
                f"each number from 1 to {len(given)}, the number of {kind}s in the record; remove media that no "
                f"placeholder refers to, or write '<{kind}>' for the next",
            )
        if given and (path := next((one for one in found if one.path), None)):
            raise DataError(
                place,
                f"found {shown(path.spelling)} in a text, and {len(given)} {kind}s next to it, expected one of them",
            )
        if not (given and numbers) and sum(one.path is None for one in found) != len(given):
            raise DataError(place, _mismatch(kind, found, len(given), keys, placeholders))
    if all_found:
        taken = Counter[str]()

        def medium(one: _Placeholder) -> dict[str, Any]:
            if one.path:
                return {"type": one.kind, one.kind: one.path}
            taken[one.kind] += one.number is None
            return media[one.kind][(one.number or taken[one.kind]) - 1]

        messages = [_filled(message, medium, placeholders) for message in messages]
    if not front:
        return messages
    at = next(number for number, message in enumerate(messages) if message["role"] == "user")
    content = messages[at]["content"]
    content = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return [*messages[:at], {**messages[at], "content": [*front, *content]}, *messages[at + 1 :]]


def _placeholders_in(message: Any, placeholders: Placeholders) -> Iterator[_Placeholder]:
    """The placeholders of a message, in order."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and placeholders == "media":
        yield from map(_of_match, _PLACEHOLDER.finditer(content))
    yield from (one for part in _parts_of(message) if (one := _of_part(part)))


def _of_match(match: re.Match[str]) -> _Placeholder:
    number, kind = match["number"], "video" if (match["kind"] or "").lower() == "video" else "image"
    return _Placeholder(kind, match[0], None if number is None else int(number), match["path"] or None)


def _of_part(part: Any) -> _Placeholder | None:
    """The placeholder that a part of a content is, if it is an image or a video without a value."""
    kind, index = _kind_of(part), part.get("index") if isinstance(part, dict) else None
    if kind is None or not isinstance(index, int | None):
        return None
    if not {key for key, value in part.items() if value is not None} <= {"type", "index", RATE, *LIMITS}:
        return None
    return _Placeholder(kind) if index is None else _Placeholder(kind, f"index {index}", index + 1)


def _check_spellings(kind: str, found: list[_Placeholder], messages: list[Any], place: str) -> None:
    """Refuse placeholders of several spellings, and in answers those that may be text."""
    if all(one.spelling in (None, *_OURS) for one in found):
        return
    for number, message in enumerate(messages, start=1):
        content = message.get("content") if isinstance(message, dict) and message.get("role") == "assistant" else None
        matches = _PLACEHOLDER.finditer(content) if isinstance(content, str) else ()
        if wrong := next((match[0] for match in matches if match[0] not in _OURS), None):
            raise DataError(
                f"{place}: message {number}",
                f"found {shown(wrong)} in an answer, which may be a placeholder or text; expected '<{kind}>' for a "
                f"placeholder; {_AS_TEXT}",
            )
    spellings = {
        "path" if one.path else "number" if one.number is not None else one.spelling: (
            "a part without its own" if one.spelling is None else shown(one.spelling)
        )
        for one in found
    }
    if len(spellings) > 1:
        first, second, *_ = spellings.values()
        raise DataError(place, f"found both {first} and {second}, expected placeholders of one spelling; {_AS_TEXT}")


def _mismatch(
    kind: str, found: list[_Placeholder], given: int, keys: Collection[str], placeholders: Placeholders
) -> str:
    spelling = shown(next((one.spelling for one in found if one.spelling), f"<{kind}>"))
    words = f"{spelling} in a text, or a part without its own" if placeholders == "media" else "parts without their own"
    problem = (
        f"found {len(found)} placeholders for {kind}s ({words}), expected {given}, the number of {kind}s in the "
        f"record; the keys are {', '.join(map(str, keys))}"
    )
    if given:
        return problem
    return f"{problem}. If one of them holds {kind}s, name it (columns.{kind}=KEY); {_AS_TEXT}"


def _filled(message: Any, medium: Callable[[_Placeholder], dict[str, Any]], placeholders: Placeholders) -> Any:
    """A message with the media of its placeholders."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and placeholders == "media" and _PLACEHOLDER.search(content):
        parts, last = [], 0
        for match in _PLACEHOLDER.finditer(content):
            # White space next to a placeholder is text: LLaVA's own "<image>\n" was trained on with its line break.
            parts += [{"type": "text", "text": content[last : match.start()]}, medium(_of_match(match))]
            last = match.end()
        parts.append({"type": "text", "text": content[last:]})
        return {**message, "content": [part for part in parts if part.get("text") != ""]}
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if one := _of_part(part):
            part = medium(one) | {key: value for key, value in part.items() if key != "index" and value is not None}
        parts.append(part)
    return {**message, "content": parts}


def _parts_of(message: Any) -> list[Any]:
    """The parts of a message's content; none for a text."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else []


def _kind_of(part: Any) -> str | None:
    """The kind of a part that is an image or a video."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) and kind in KEYS_OF_KIND else None
