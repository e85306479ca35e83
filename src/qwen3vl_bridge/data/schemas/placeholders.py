"""Places in a conversation for the pictures and videos that stand beside it.

What lives here: "<image>" and "<video>" in texts, how others spell them, how many there must be. What may not: which
keys hold media (`media_keys.py`), how turns are spelt (`spellings.py`), anything but the standard library.

Each "<image>" or "<video>" in a text stands for the next of the media beside the messages, and so does a part
{"type": "image"} without a picture of its own. In a content that is a list of parts, a text is text. There are as many
places as media, or a record is refused: also one without media, whose "<image>" would be trained on as the letters it
is spelt with.

Others spell places otherwise, one way in a record:

* "<img>", "<ImageHere>", "<Image>", "<image_placeholder>", "<|image|>" are "<image>", and likewise of videos;
* "<image 1>", "<image_1>", "<image1>", "<|image_1|>" are the picture of that number, counted from 1, as often as they
  name it; every picture is named at least once;
* a part {"type": "image", "index": 0} is the picture of that index, counted from 0, and likewise of videos;
* "<img>PATH</img>", as Qwen-VL has it, is the picture of that path, and none stands beside.

They stand in what is asked. In an answer they may as well be text, which nobody can tell, and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.schemas.media_keys import BESIDE, may_hold_media, parts_of, shown

Placeholders = Literal["media", "text"]

LIMITS = ("min_pixels", "max_pixels")  # of a picture's own, beside it
_OURS = ("<image>", "<video>")
_PLACE = re.compile(
    r"<img>(?P<path>[^<>\n]{0,4096})</img>"
    r"|<(?P<bar>\|)?(?P<kind>image|img|video)([ _-]?(?P<number>\d{1,4})|here|[ _-]?placeholder)?(?(bar)\|)>",
    re.IGNORECASE,
)
# What somebody may have meant as a place, in a spelling that is not read.
_LIKE_A_PLACE = re.compile(
    r"<\s*/?\|?\s*(image|img|picture|pic|photo|video|clip|frame)s?([\s_-]*(token|pad|placeholder|context|\d+))?\s*\|?/?\s*>"
    r"|[\[{]{1,2}\s*(image|img|picture|photo|video)s?([\s_-]*\d+)?\s*[\]}]{1,2}",
    re.IGNORECASE,
)
_AS_TEXT = "where text is meant, write the content as a list of parts, or set columns.placeholders=text"


class _Place(NamedTuple):
    """A place for a picture or a video in a text.

    Attributes:
        kind: "image" or "video".
        spelling: as it is written.
        number: of the medium, counted from 1; None for the next.
        path: of the medium, where the text says it.
    """

    kind: str
    spelling: str
    number: int | None = None
    path: str | None = None


def with_media(
    messages: list[Any],
    media: Mapping[str, list[Any]],
    place: str,
    *,
    record: Mapping[str, Any],
    known: Collection[str],
    placeholders: Placeholders = "media",
    in_front: bool = False,
) -> list[Any]:
    """The messages with each place made the medium that it stands for.

    Args:
        messages: they.
        media: of each kind, in their order.
        place: where the record stands, for messages.
        record: as it was read, for messages.
        known: keys of it that are read.
        placeholders: whether "<image>" and "<video>" in a text are places, or text.
        in_front: media of a kind for which there is no place at all stand before the first question.

    Raises:
        DataError: not as many places of a kind as media, or places of which it is not known what they stand for.
    """
    front, rest = [], dict[str, _Rest]()
    for kind in BESIDE:
        found, given = list(_places(messages, kind, placeholders)), media.get(kind, [])
        if in_front and not found:
            if given and placeholders == "media":
                _check_likeness(kind, len(given), messages, place)
            front += [{"type": kind, kind: medium} for medium in given]
            continue
        _check_spellings(found, messages, place)
        _check_named(kind, found, len(given), place)
        wanted = len(given) if _numbers(found) and given else sum(one is None or one.path is None for one in found)
        if wanted != len(given):
            likely = may_hold_media(record, known)
            raise DataError(place, _mismatch(kind, found, len(given), list(record), likely, placeholders))
        if found:
            rest[kind] = _Rest(given)
    filled = [_filled(message, rest, placeholders) for message in messages] if rest else messages
    return _before_the_first_question(filled, front) if front else filled


def _check_spellings(found: list[_Place | None], messages: list[Any], place: str) -> None:
    """Refuses places of which it is not known what they stand for."""
    other = [one for one in found if one is not None and one.spelling not in _OURS]
    if not other:
        return
    for number, message in enumerate(messages, start=1):
        said = _texts_places(message) if isinstance(message, dict) and message.get("role") == "assistant" else ()
        if wrong := [one.spelling for one in said if one.spelling not in _OURS]:
            raise DataError(
                f"{place}: message {number}",
                f"found {shown(wrong[0])} in an answer, which may be meant as a place or as text; expected "
                f"'<{other[0].kind}>' for a place; {_AS_TEXT}",
            )
    ways = dict[str, str]()
    for one in found:
        way = "part" if one is None else "path" if one.path else "number" if one.number is not None else one.spelling
        ways[way] = "a part without its own" if one is None else shown(one.spelling)
    if len(ways) > 1:
        first, second, *_ = ways.values()
        raise DataError(place, f"found both {first} and {second}, expected placeholders of one spelling; {_AS_TEXT}")


def _check_likeness(kind: str, given: int, messages: list[Any], place: str) -> None:
    """Refuses media that would stand in front of a question which seems to say itself where."""
    for message in messages:
        content = message.get("content") if message.get("role") == "user" else None
        matches = _LIKE_A_PLACE.finditer(content) if isinstance(content, str) else ()
        if match := next((match for match in matches if not _PLACE.fullmatch(match[0])), None):
            raise DataError(
                place,
                f"found {shown(match[0])} in a question, which is no place that is read, and {given} {kind}s, expected "
                f"'<{kind}>' where each stands; {_AS_TEXT}",
            )


def _check_named(kind: str, found: list[_Place | None], given: int, place: str) -> None:
    """Refuses numbers of media that are not there, media that no number names, and paths beside media."""
    if given and (path := next((one for one in found if one is not None and one.path), None)):
        raise DataError(
            place, f"found {shown(path.spelling)} in a text, and {given} {kind}s beside it, expected one of them"
        )
    if (numbers := _numbers(found)) and given and numbers != set(range(1, given + 1)):
        words = ", ".join(map(str, sorted(numbers)))
        raise DataError(
            place,
            f"found places for the {kind}s of the numbers {words}, expected each number from 1 to {given}, as many "
            f"{kind}s as stand beside the messages; remove media that no placeholder refers to, or "
            f"write '<{kind}>' for the next",
        )


def _numbers(found: list[_Place | None]) -> set[int]:
    """Which media are named by their numbers."""
    return {one.number for one in found if one is not None and one.number is not None}


def _mismatch(
    kind: str, found: list[_Place | None], given: int, keys: list[str], likely: str | None, placeholders: Placeholders
) -> str:
    spelling = shown(next((one.spelling for one in found if one is not None), f"<{kind}>"))
    words = f"{spelling} in a text, or a part without its own" if placeholders == "media" else "parts without their own"
    problem = (
        f"found {len(found)} places for {kind}s ({words}), expected {given}, as many as stand beside the messages; the "
        f"keys are {', '.join(map(str, keys))}"
    )
    if given:
        return problem
    named = "Name the one that holds them" if likely is None else f"It may be {likely!r} that holds them"
    return (
        f"{problem}. {named} (columns.{kind}={likely or 'KEY'}); where {spelling} is meant as text, set "
        "columns.placeholders=text, or write the content as a list of parts"
    )


def _places(messages: list[Any], kind: str, placeholders: Placeholders) -> Iterator[_Place | None]:
    """Places of a kind, in their order; None for a part without a medium of its own."""
    for message in messages:
        if placeholders == "media":
            yield from (one for one in _texts_places(message) if one.kind == kind)
        yield from (_place_in(part, kind) for part in parts_of(message) if _bare(part) == kind)


def _texts_places(message: Any) -> Iterator[_Place]:
    """Places in a content that is a text."""
    content = message.get("content") if isinstance(message, dict) else None
    yield from map(_place_of, _PLACE.finditer(content)) if isinstance(content, str) else ()


def _place_of(match: re.Match[str]) -> _Place:
    path, number = match["path"], match["number"]
    kind = "video" if (match["kind"] or "").lower() == "video" else "image"
    return _Place(kind, match[0], None if number is None else int(number), path or None)


def _bare(part: Any) -> str | None:
    """The kind of a part that is a picture or a video, and has none of its own."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in BESIDE or not isinstance(part.get("index"), int | None):
        return None
    given = {key for key, value in part.items() if value is not None}
    return kind if given <= {"type", "index", "sample_fps", *LIMITS} else None


def _place_in(part: Mapping[str, Any], kind: str) -> _Place | None:
    """The place of a part that says by its index which medium it is; None for the next."""
    index = part.get("index")
    return None if index is None else _Place(kind, f"index {index}", index + 1)


class _Rest:
    """The media of a kind: the next that no place has taken, or that of a number."""

    def __init__(self, media: list[Any]) -> None:
        self._media, self._taken = media, 0

    def take(self, number: int | None) -> Any:
        if number is None:
            self._taken += 1
        return self._media[(number or self._taken) - 1]


def _filled(message: Any, rest: Mapping[str, _Rest], placeholders: Placeholders) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and placeholders == "media" and _PLACE.search(content):
        parts, last = [], 0
        for match in _PLACE.finditer(content):
            # White space beside a placeholder is text: LLaVA's own "<image>\n" was trained on with its line break.
            parts += [_text(content[last : match.start()]), _medium_part(_place_of(match), rest)]
            last = match.end()
        return {**message, "content": [part for part in (*parts, _text(content[last:])) if part.get("text") != ""]}
    if isinstance(content, list):
        return {**message, "content": [_filled_part(part, rest) for part in content]}
    return message


def _filled_part(part: Any, rest: Mapping[str, _Rest]) -> Any:
    if not (kind := _bare(part)):
        return part
    place = _place_in(part, kind)
    others = {key: value for key, value in part.items() if key != "index"}
    return {**others, **_next(kind, rest, place and place.number)}


def _text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def _medium_part(place: _Place, rest: Mapping[str, _Rest]) -> dict[str, Any]:
    return {"type": place.kind, place.kind: place.path} if place.path else _next(place.kind, rest, place.number)


def _next(kind: str, rest: Mapping[str, _Rest], number: int | None = None) -> dict[str, Any]:
    return {"type": kind, kind: rest[kind].take(number)}


def _before_the_first_question(messages: list[Any], parts: list[dict[str, Any]]) -> list[Any]:
    at = next(number for number, message in enumerate(messages) if message["role"] == "user")
    content = messages[at]["content"]
    content = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return [*messages[:at], {**messages[at], "content": [*parts, *content]}, *messages[at + 1 :]]
