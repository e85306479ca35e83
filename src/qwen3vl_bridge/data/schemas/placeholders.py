"""Placeholders in a conversation for the images and videos that are next to it in the record.

Each "<image>" or "<video>" in a text stands for the next of the record's media, and so does a part {"type": "image"}
without an image of its own. In a content that is a list of parts, a text is literal. The number of placeholders must be
that of media, or a record is refused: also one without media, whose "<image>" would be trained on as text.

Other spellings, of which a record may use only one:

* "<img>", "<ImageHere>", "<Image>", "<image_placeholder>", "<|image|>" mean "<image>", and the same for videos;
* "<image 1>", "<image_1>", "<image1>", "<|image_1|>" mean the image of that number, counted from 1, any number of
  times; every image is named at least once;
* a part {"type": "image", "index": 0} means the image of that index, counted from 0, and the same for videos;
* "<img>PATH</img>", as in Qwen-VL, means the image of that path, without media next to the messages.

They are read in questions. In an answer they could as well be text, which cannot be decided, and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.schemas.media_keys import BESIDE, RATE, may_hold_media, parts_of, shown

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
