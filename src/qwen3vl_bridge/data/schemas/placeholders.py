"""Media next to the messages of a record, and the placeholders that they replace."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple
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


Placeholders = Literal["media", "text"]

LIMITS = ("min_pixels", "max_pixels")  # limits of an image, next to it
_OURS = ("<image>", "<video>")
_PLACE = re.compile(
    r"<img>(?P<path>[^<>\n]{0,4096})</img>"
    r"|<(?P<bar>\|)?(?P<kind>image|img|video)([ _-]?(?P<number>\d{1,4})|here|[ _-]?placeholder)?(?(bar)\|)>",
    re.IGNORECASE,
)
# Possible placeholders in a spelling that is not read.
_LIKE_A_PLACE = re.compile(
    r"<\s*/?\|?\s*(image|img|picture|pic|photo|video|clip|frame)s?([\s_-]*(token|pad|placeholder|context|\d+))?\s*\|?/?\s*>"
    r"|[\[{]{1,2}\s*(image|img|picture|photo|video)s?([\s_-]*\d+)?\s*[\]}]{1,2}",
    re.IGNORECASE,
)
_AS_TEXT = "where text is meant, write the content as a list of parts, or set columns.placeholders=text"


class _Place(NamedTuple):
    """A placeholder for an image or a video in a text."""

    kind: str
    spelling: str
    number: int | None = None
    path: str | None = None


def with_media(
    messages: list[Any],
    media: Mapping[str, list[dict[str, Any]]],
    place: str,
    *,
    record: Mapping[str, Any],
    known: Collection[str],
    placeholders: Placeholders = "media",
    in_front: bool = False,
) -> list[Any]:
    """The messages with each placeholder replaced by its medium.

    Args:
        messages: the messages.
        media: of each kind, in order, as parts.
        place: position of the record, for messages.
        record: as it was read, for messages.
        known: keys of it that are read.
        placeholders: whether "<image>" and "<video>" in a text are placeholders, or literal text.
        in_front: insert media of a kind without any placeholder before the first question.

    Raises:
        DataError: another number of placeholders of a kind than media, or ambiguous placeholders.
    """
    front, unused = [], dict[str, _UnusedMedia]()
    for kind in BESIDE:
        found, given = list(_places(messages, kind, placeholders)), media.get(kind, [])
        if in_front and not found:
            if given and placeholders == "media":
                _check_likeness(kind, len(given), messages, place)
            front += given
            continue
        _check_spellings(found, messages, place)
        _check_named(kind, found, len(given), place)
        wanted = len(given) if _numbers(found) and given else sum(one is None or one.path is None for one in found)
        if wanted != len(given):
            likely = may_hold_media(record, known)
            raise DataError(place, _mismatch(kind, found, len(given), list(record), likely, placeholders))
        if found:
            unused[kind] = _UnusedMedia(given)
    filled = [_filled(message, unused, placeholders) for message in messages] if unused else messages
    return _before_the_first_question(filled, front) if front else filled


def _check_spellings(found: list[_Place | None], messages: list[Any], place: str) -> None:
    """Refuse ambiguous placeholders."""
    other = [one for one in found if one is not None and one.spelling not in _OURS]
    if not other:
        return
    for number, message in enumerate(messages, start=1):
        said = _texts_places(message) if isinstance(message, dict) and message.get("role") == "assistant" else ()
        if wrong := [one.spelling for one in said if one.spelling not in _OURS]:
            raise DataError(
                f"{place}: message {number}",
                f"found {shown(wrong[0])} in an answer, which may be a placeholder or text; expected "
                f"'<{other[0].kind}>' for a placeholder; {_AS_TEXT}",
            )
    ways = dict[str, str]()
    for one in found:
        way = "part" if one is None else "path" if one.path else "number" if one.number is not None else one.spelling
        ways[way] = "a part without its own" if one is None else shown(one.spelling)
    if len(ways) > 1:
        first, second, *_ = ways.values()
        raise DataError(place, f"found both {first} and {second}, expected placeholders of one spelling; {_AS_TEXT}")


def _check_likeness(kind: str, given: int, messages: list[Any], place: str) -> None:
    """Refuse media that would be inserted before a question that seems to have its own kind of placeholders."""
    for message in messages:
        content = message.get("content") if message.get("role") == "user" else None
        matches = _LIKE_A_PLACE.finditer(content) if isinstance(content, str) else ()
        if match := next((match for match in matches if not _PLACE.fullmatch(match[0])), None):
            raise DataError(
                place,
                f"found {shown(match[0])} in a question, which is not a supported placeholder, and {given} {kind}s, "
                f"expected '<{kind}>' where each stands; {_AS_TEXT}",
            )


def _check_named(kind: str, found: list[_Place | None], given: int, place: str) -> None:
    """Refuse numbers of media that do not exist, media that no number names, and paths in addition to media."""
    if given and (path := next((one for one in found if one is not None and one.path), None)):
        raise DataError(
            place, f"found {shown(path.spelling)} in a text, and {given} {kind}s next to it, expected one of them"
        )
    if (numbers := _numbers(found)) and given and numbers != set(range(1, given + 1)):
        words = ", ".join(map(str, sorted(numbers)))
        raise DataError(
            place,
            f"found placeholders for the {kind}s of the numbers {words}, expected each number from 1 to {given}, the "
            f"number of {kind}s in the record; remove media that no placeholder refers to, or "
            f"write '<{kind}>' for the next",
        )


def _numbers(found: list[_Place | None]) -> set[int]:
    """The media that are named by their numbers."""
    return {one.number for one in found if one is not None and one.number is not None}


def _mismatch(
    kind: str, found: list[_Place | None], given: int, keys: list[str], likely: str | None, placeholders: Placeholders
) -> str:
    spelling = shown(next((one.spelling for one in found if one is not None), f"<{kind}>"))
    words = f"{spelling} in a text, or a part without its own" if placeholders == "media" else "parts without their own"
    problem = (
        f"found {len(found)} placeholders for {kind}s ({words}), expected {given}, the number of {kind}s in the "
        f"record; the keys are {', '.join(map(str, keys))}"
    )
    if given:
        return problem
    named = "Name the one that holds them" if likely is None else f"It may be {likely!r} that holds them"
    return (
        f"{problem}. {named} (columns.{kind}={likely or 'KEY'}); where {spelling} is meant as text, set "
        "columns.placeholders=text, or write the content as a list of parts"
    )


def _places(messages: list[Any], kind: str, placeholders: Placeholders) -> Iterator[_Place | None]:
    """Placeholders of a kind, in order; None for a part without a medium of its own."""
    for message in messages:
        if placeholders == "media":
            yield from (one for one in _texts_places(message) if one.kind == kind)
        yield from (_place_in(part, kind) for part in parts_of(message) if _bare(part) == kind)


def _texts_places(message: Any) -> Iterator[_Place]:
    """Placeholders in a content that is a text."""
    content = message.get("content") if isinstance(message, dict) else None
    yield from map(_place_of, _PLACE.finditer(content)) if isinstance(content, str) else ()


def _place_of(match: re.Match[str]) -> _Place:
    path, number = match["path"], match["number"]
    kind = "video" if (match["kind"] or "").lower() == "video" else "image"
    return _Place(kind, match[0], None if number is None else int(number), path or None)


def _bare(part: Any) -> str | None:
    """The kind of a part that is an image or a video without a value."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in BESIDE or not isinstance(part.get("index"), int | None):
        return None
    given = {key for key, value in part.items() if value is not None}
    return kind if given <= {"type", "index", RATE, *LIMITS} else None


def _place_in(part: Mapping[str, Any], kind: str) -> _Place | None:
    """The place of a part that says by its index which medium it is; None for the next."""
    index = part.get("index")
    return None if index is None else _Place(kind, f"index {index}", index + 1)


class _UnusedMedia:
    """The media of a kind, as parts: the next that is not used yet, or that of a number."""

    def __init__(self, media: list[dict[str, Any]]) -> None:
        self._media, self._taken = media, 0

    def take(self, number: int | None) -> dict[str, Any]:
        if number is None:
            self._taken += 1
        return self._media[(number or self._taken) - 1]


def _filled(message: Any, unused: Mapping[str, _UnusedMedia], placeholders: Placeholders) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and placeholders == "media" and _PLACE.search(content):
        parts, last = [], 0
        for match in _PLACE.finditer(content):
            # White space next to a placeholder is text: LLaVA's own "<image>\n" was trained on with its line break.
            parts += [_text(content[last : match.start()]), _medium_part(_place_of(match), unused)]
            last = match.end()
        return {**message, "content": [part for part in (*parts, _text(content[last:])) if part.get("text") != ""]}
    if isinstance(content, list):
        return {**message, "content": [_filled_part(part, unused) for part in content]}
    return message


def _filled_part(part: Any, unused: Mapping[str, _UnusedMedia]) -> Any:
    if not (kind := _bare(part)):
        return part
    place = _place_in(part, kind)
    own = {key: value for key, value in part.items() if key != "index" and value is not None}
    return unused[kind].take(place and place.number) | own


def _text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def _medium_part(place: _Place, unused: Mapping[str, _UnusedMedia]) -> dict[str, Any]:
    return {"type": place.kind, place.kind: place.path} if place.path else unused[place.kind].take(place.number)


def _before_the_first_question(messages: list[Any], parts: list[dict[str, Any]]) -> list[Any]:
    at = next(number for number, message in enumerate(messages) if message["role"] == "user")
    content = messages[at]["content"]
    content = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return [*messages[:at], {**messages[at], "content": [*parts, *content]}, *messages[at + 1 :]]
