"""Images and videos next to the messages of a record, and the placeholders in its texts that they replace.

Media are under "image" or "images", "video" or "videos", each one or a list; a video in a list may be a list of frames.
Each "<image>" or "<video>" in a text stands for the next of them, and so does a part {"type": "image"} without an image
of its own. In a content that is a list of parts, a text is literal. Of the other spellings (docs/data.md) a record may
use only one, and only in questions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from qwen3vl_bridge.data.errors import DataError

Placeholders = Literal["media", "text"]

KEYS_OF_KIND = {"image": ("image", "images"), "video": ("video", "videos")}
MEDIA_KEYS = tuple(key for keys in KEYS_OF_KIND.values() for key in keys)
RATE = "sample_fps"  # frames per second of a video that is a list of frames, as Qwen's message format calls it
LIMITS = ("min_pixels", "max_pixels")  # of an image, in its part of a content
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
# Beginnings of JPEG, PNG, GIF, RIFF (WebP, AVI), TIFF, BMP, MP4 and Matroska in base64.
_ENCODED = re.compile(
    r"(/9j/|iVBORw0KGgo|R0lGOD[dl]h|UklGR|SUkqA|TU0AK|Qk[\w+/]{6}AAAA|AAAA[\w+/]{2}Z0eX|GkXfo)[\w+/\s]{40,}=*\s*",
    re.ASCII,
)
_FILE = re.compile(
    r"data:(image|video)/.*"
    r"|[^\n]{1,4096}\.(jpe?g|png|webp|gif|bmp|tiff?|heic|avif|mp4|m4v|mov|mkv|webm|avi|mpe?g|flv|wmv)(\?\S*)?\s*",
    re.IGNORECASE | re.DOTALL,
)
_URL = re.compile(r"https?://", re.IGNORECASE)


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
    return given.get("bytes") or given.get("path") if set(given) <= {"bytes", "path"} else item


def is_none(value: Any) -> bool:
    """Whether a value means that there is no medium: null, an empty text, list or object, or a list of these."""
    if isinstance(value, list):
        return not any(isinstance(item, list) or not is_none(item) for item in value)
    return stored(value) in (None, "", b"", {})


def medium_of(value: Any, place: str) -> Any:
    """A medium, or each frame of a video, as a path, a URL or bytes. Anything else is unchanged, and refused later.

    The path of a "file://" URL (of this host, else `DataError`), percent signs decoded; base64 as a "data:" URL.
    """
    if isinstance(value, list):
        return [medium_of(frame, place) for frame in value]
    value = stored(value)
    if not isinstance(value, str) or value[:6].lower() != "file:/":
        is_base64 = isinstance(value, str) and _ENCODED.fullmatch(value)
        return f"data:;base64,{''.join(value.split())}" if is_base64 else value
    try:
        address = urlsplit(value)
        path = unquote(address.path, errors="strict")
    except ValueError as error:
        raise DataError(place, f"found the URL {value[:80]!r}, expected file:///PATH ({error})") from error
    if address.netloc.lower() not in ("", "localhost"):
        raise DataError(place, f"found the URL {value[:80]!r}, a file of {address.netloc!r}, expected file:///PATH")
    if address.query or address.fragment:
        raise DataError(place, f"found the URL {value[:80]!r}, expected '?' and '#' in a path as %3F and %23")
    return path


def pop_media(record: dict[str, Any], place: str) -> dict[str, list[dict[str, Any]]]:
    """The media of each kind that are next to the messages, as parts, taken out of the record; {} without any.

    Raises:
        DataError: both names of a kind are set, or rates that do not fit the videos.
    """
    media: dict[str, list[dict[str, Any]]] = {}
    for kind, keys in KEYS_OF_KIND.items():
        given = {key: value for key in keys if not is_none(value := record.pop(key, None))}
        if len(given) > 1:
            raise DataError(place, f"found both {' and '.join(map(repr, given))}, expected one of them")
        for value in given.values():
            media[kind] = [{"type": kind, kind: item} for item in (value if isinstance(value, list) else [value])]
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


def check_unread(record: Mapping[str, Any], known: Collection[str], messages: list[Any], place: str) -> None:
    """Refuse a key that is not read and seems to hold media, by its name or by its value.

    Not refused, next to media that are read, are other names of these files, ids, and URLs. `messages` are in our own
    spelling, with their media; `known` are keys that are read or ignored on purpose.
    """
    unread = {key: value for key, value in record.items() if key not in known and not is_none(value)}
    if not unread:
        return
    parts = [part for message in messages if isinstance(message, dict) for part in _parts_of(message.get("content"))]
    media = [part for part in parts if isinstance(part, dict) and part.get("type") in ("image", "video")]
    # Bytes that are read may have a name in the record.
    files = [*(part.get(part["type"]) for part in media), *(record.get(key) for key in MEDIA_KEYS)]
    names = [name for file in files for name in _leaves(file, named=True) if isinstance(name, str)]
    read = [PurePosixPath(name).parts for name in names if not name.startswith("data:")]
    for key, value in unread.items():
        leaves = _leaves(value)
        named = _NAMED_AS_MEDIA.fullmatch(str(key)) and isinstance(value, (str, bytes, list, dict))
        if media and isinstance(value, str):
            # One path that is the end of another may be the same file; A/1.png and B/1.png are not.
            end = PurePosixPath(value).parts
            if _NAMED_AS_ID.fullmatch(str(key)) or any(a[-len(end) :] == end[-len(a) :] for a in read if a and end):
                continue
        are_urls = all(isinstance(leaf, str) and _URL.match(leaf) for leaf in leaves)
        if are_urls and any(not named or part["type"] == _kind_named(str(key)) for part in media):
            continue
        if named or (leaves and all(map(_looks_like_media, leaves))):
            raise DataError(place, unread_media(str(key), record))


def refuse_objects(record: Mapping[str, Any], messages: list[Any], place: str) -> None:
    """Refuse ms-swift's placeholders for the names and boxes under `objects`, which would be trained on as they are."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    found = [
        name for name in ("<ref-object>", "<bbox>") if any(isinstance(text, str) and name in text for text in texts)
    ]
    if found and record.get("objects") is not None:
        raise DataError(
            place,
            f"found {' and '.join(found)} in a text next to 'objects', expected texts without: they are not replaced "
            "here. Write each name, and each box in coordinates from 0 to 1000 of the image's width and height, into "
            "the text, as ms-swift does for Qwen3-VL",
        )


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


def _leaves(value: Any, *, named: bool = False) -> list[Any]:
    """The first media of a value, if they are media: paths, URLs or bytes, or with `named` the names of bytes."""
    if isinstance(value, list):
        return [leaf for item in (value if named else value[:4]) for leaf in _leaves(item, named=named)]
    if isinstance(value, dict) and (set(value) == {"url"} or (named and value.get("path"))):
        return [value.get("url") or value.get("path")]
    return [stored(value)]


def _looks_like_media(value: Any) -> bool:
    return isinstance(value, bytes) or (
        isinstance(value, str) and bool(_FILE.fullmatch(value) or _ENCODED.match(value[:256]))
    )


class _Placeholder(NamedTuple):
    """A placeholder for the next image or video, or for that of a number or a path."""

    kind: str
    spelling: str
    number: int | None = None
    path: str | None = None
    part: dict[str, Any] | None = None  # a part without a medium of its own


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
    contents = [list(_split(message, placeholders)) for message in messages]
    front: list[dict[str, Any]] = []
    taken = {kind: iter(media.get(kind, ())) for kind in KEYS_OF_KIND}
    for kind in KEYS_OF_KIND:
        found, spellings = [], dict[str, str]()
        for at, content in enumerate(contents):
            for one in (one for one in content if isinstance(one, _Placeholder) and one.kind == kind):
                if messages[at].get("role") == "assistant" and not one.part and one.spelling not in _OURS:
                    raise DataError(
                        f"{place}: message {at + 1}",
                        f"found {shown(one.spelling)} in an answer, which may be a placeholder or text; expected "
                        f"'<{kind}>' for a placeholder; {_AS_TEXT}",
                    )
                found.append(one)
                spellings.setdefault(
                    "path" if one.path else one.spelling if one.number is None else "number", one.spelling
                )
        given = media.get(kind, [])
        if in_front and not found:
            front += given
            continue
        if len(spellings) > 1:
            first, second, *_ = map(shown, spellings.values())
            problem = f"found both {first} and {second}, expected placeholders of one spelling; {_AS_TEXT}"
            raise DataError(place, problem)
        numbers = {one.number for one in found if one.number is not None}
        if given and numbers and numbers != set(range(1, len(given) + 1)):
            raise DataError(
                place,
                f"found placeholders for the {kind}s of the numbers {', '.join(map(str, sorted(numbers)))}, expected "
                f"each number from 1 to {len(given)}, the number of {kind}s in the record; remove media that no "
                f"placeholder refers to, or write '<{kind}>' for the next",
            )
        count = len(given) if given and numbers else sum(one.path is None for one in found)
        if count != len(given):
            spelling = shown(found[0].spelling if found else f"<{kind}>")
            words = f"{spelling} in a text, or a part without its own"
            hint = "" if given else f". If one of them holds {kind}s, name it (columns.{kind}=KEY); {_AS_TEXT}"
            raise DataError(
                place,
                f"found {count} placeholders for {kind}s ({words}), expected {len(given)}, the number of {kind}s in "
                f"the record; the keys are {', '.join(map(str, keys))}{hint}",
            )

    def filled(one: Any) -> Any:
        if not isinstance(one, _Placeholder):
            return one
        if one.path:
            return {"type": one.kind, one.kind: one.path}
        return (next(taken[one.kind]) if one.number is None else media[one.kind][one.number - 1]) | (one.part or {})

    own = []
    for message, content in zip(messages, contents, strict=True):
        has_any = any(isinstance(one, _Placeholder) for one in content)
        own.append({**message, "content": list(map(filled, content))} if has_any else message)
    if front:
        at = next(number for number, message in enumerate(own) if message.get("role") == "user")
        content = own[at].get("content")
        content = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        if isinstance(content, list):  # anything else is refused later
            own[at] = {**own[at], "content": [*front, *content]}
    return own


def _split(message: Any, placeholders: Placeholders) -> Iterator[Any]:
    """The parts of a content, with a `_Placeholder` for each that is one; of a text, what is between them as parts."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and placeholders == "media":
        last = 0
        for match in _PLACEHOLDER.finditer(content):
            # White space next to a placeholder is text: LLaVA's own "<image>\n" was trained on with its line break.
            if text := content[last : match.start()]:
                yield {"type": "text", "text": text}
            kind = "video" if (match["kind"] or "").lower() == "video" else "image"
            number = None if match["number"] is None else int(match["number"])
            yield _Placeholder(kind, match[0], number, match["path"] or None)
            last = match.end()
        if text := content[last:]:
            yield {"type": "text", "text": text}
    for part in _parts_of(content):
        given = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
        kind, index = given.get("type"), given.pop("index", None)
        if kind not in ("image", "video") or set(given) - {"type", RATE, *LIMITS} or not isinstance(index, int | None):
            yield part
        elif index is None:
            yield _Placeholder(str(kind), f"<{kind}>", part=given)
        else:
            yield _Placeholder(str(kind), f"index {index}", index + 1, part=given)


def _parts_of(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []
