"""Conversations: every spelling of a record (docs/data.md lists them) converted to our own, and validated.

Our own is {"messages": [{"role": "user", "content": "..."}, ...]}. Roles are system, user, assistant and tool. Content
is a string, or a list of parts {"type": "text", "text": "..."}, {"type": "image", "image": MEDIUM} and {"type":
"video", "video": MEDIUM}, where a medium is a path, a URL, "data:...;base64,...", bytes, or {"bytes": ..., "path":
...}; a video may also be a list of images with "sample_fps".

Tables, and JSON written from them, have null for keys that an object lacks. Such keys count as missing everywhere, and
are removed from tools and their calls, which chat templates render whole; strings of JSON are taken as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.images import MOST_PIXELS
from qwen3vl_bridge.data.media.media_access import FrameList, Media, MediaAccess, Video, find
from qwen3vl_bridge.data.schemas.placeholders import (
    LIMITS,
    MEDIA_KEYS,
    RATE,
    Placeholders,
    check_unread,
    medium_of,
    pop_media,
    refuse_objects,
    shown,
    with_media,
    without_nulls,
)
from qwen3vl_bridge.io.parsing import parse_record

ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # other names of roles
LOSS = ("loss", "weight")  # next to an assistant's message: whether it is trained on
TURNS = ("messages", "conversations", "texts")
QUESTIONS = {"question": "answer", "query": "response", "prompt": "completion", "instruction": "output"}
KEYS = (*TURNS, "system", "tools", *MEDIA_KEYS, RATE, *QUESTIONS, *QUESTIONS.values(), "input", "history")
_OF_MESSAGES = (*LOSS, "reasoning_content", "tool_calls", *LIMITS)  # and of content parts
PARTS = ("text", "image", "video")
_OPTIONAL = {"reasoning_content", "tool_calls", "tool_call_id", "name"}  # keys of a message
# OpenAI's types of content parts. A medium of any type may be under "url" or "path" too, as in transformers' templates.
_PART_TYPES = {
    "input_text": "text",
    "output_text": "text",
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
}


def _folded(key: object) -> str:
    return re.sub(r"[\W_]", "", str(key)).lower()


_MEANT = {_folded(key): key for key in (*KEYS, *_OF_MESSAGES)}
EXPECTED = (
    "'messages' or 'conversations', 'texts', a question with its answer ("
    + ", ".join(f"{question!r} and {answer!r}" for question, answer in QUESTIONS.items())
    + "), or the setting columns with the names that they have here"
)


def messages_of(record: Any, place: str, *, placeholders: Placeholders = "media") -> Any:
    """Convert a record, which is never changed, to our own spelling; `place` is its position in the data, for messages.
    A value that is not an object, or has no messages, is returned for later checks.

    Raises:
        DataError: keys of several spellings or of none, placeholders that do not match the media next to them, or an
            unknown key that seems to hold media.
    """
    if not isinstance(record, dict):
        return record
    # Tables and their exports give every row all keys, with null for missing ones.
    keys = [key for key, value in record.items() if value is not None]
    own, spelling = dict(record), spelling_of(keys, place)
    if spelling is None:
        if keys:
            raise DataError(place, f"found the keys {', '.join(map(str, record))}, expected {EXPECTED}")
        return own
    for key, with_keys in (("history", tuple(QUESTIONS)), ("input", ("instruction",))):
        if spelling not in with_keys and record.get(key) not in (None, "", []):
            raise DataError(
                place,
                f"found {key!r} next to {spelling!r}, with which it is not read, expected it next to "
                f"{' or '.join(map(repr, with_keys))}; leave it out (columns.ignore=[{key}]), or write it into a "
                "question (columns.question)",
            )
    messages = own["messages"] = _pop_messages(own, spelling, place)
    tools = own.pop("tools", None)
    try:
        text = tools.strip() if isinstance(tools, str) else None
        tools = without_nulls(tools) if text is None else parse_record(text) if text else None
    except ValueError as error:
        problem = f"found a string that is not valid JSON ({error}), expected a list"
        raise DataError(f"{place}: 'tools'", problem) from error
    if tools is not None:
        own["tools"] = tools
    if not isinstance(messages, list):
        return own
    system = own.pop("system", None)
    if not isinstance(system, str | None):
        raise DataError(place, f"found {shown(system)} under 'system', expected a string")
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    messages = [_own_message(message, f"{place}: message {i}") for i, message in enumerate(messages, start=1)]
    if system and any(isinstance(message, dict) and message.get("role") == "system" for message in messages[1:]):
        raise DataError(place, "found both 'system' and a turn of it, expected one of them")
    refuse_objects(record, messages, place)
    in_front = spelling not in ("messages", "conversations")
    media = pop_media(own, place)
    messages = with_media(messages, media, place, keys=keys, placeholders=placeholders, in_front=in_front)
    check_unread(record, KEYS, messages, place)
    # Ignored, these would train on something else than the record means.
    for key in keys:
        if key not in KEYS and (meant := _MEANT.get(_folded(key))):
            expected = f"{meant!r} in a message or its content" if meant in _OF_MESSAGES else repr(meant)
            problem = f"found {key!r}, which is not read here, expected {expected}"
            raise DataError(place, f"{problem}; or leave it out (columns.ignore=[{key}])")
    for number, message in enumerate(messages, start=1):
        content = message.get("content") if isinstance(message, dict) else None
        for at, part in enumerate(content if isinstance(content, list) else (), start=1):
            if isinstance(part, dict) and (kind := part.get("type")) in ("image", "video") and kind in part:
                part[kind] = medium_of(part[kind], f"{place}: message {number}, part {at}")
    own["messages"] = messages
    return own


def spelling_of(keys: Collection[str], place: str) -> str | None:
    """The key of a record's turns, or of its questions, None if it has neither; a `DataError` for several of them."""
    # Half a pair gives no turns: HuggingFaceH4/ultrachat_200k has `messages`, and the first of them again as `prompt`.
    asked = [question for question, answer in QUESTIONS.items() if question in keys and answer in keys]
    found = [*(key for key in TURNS if key in keys), *asked]
    if len(found) > 1:
        words = [f"{key!r} with {QUESTIONS[key]!r}" if key in QUESTIONS else repr(key) for key in found]
        raise DataError(
            place,
            f"found both {words[0]} and {words[1]}, which each give the turns, expected one of them: leave the others "
            f"out, such as columns.ignore=[{','.join(found[1:])}]",
        )
    return found[0] if found else None


def _pop_messages(own: dict[str, Any], spelling: str, place: str) -> Any:
    """The turns as messages; their keys are removed from the record."""
    turns = own.pop(spelling)
    if spelling in ("messages", "conversations"):
        return turns
    if spelling == "texts":  # the_cauldron's
        names, others = {"user", "assistant"}, {"user", "assistant", "source"}
        pairs = turns if isinstance(turns, list) else []
        each = [set(_given(pair)) if isinstance(pair, dict) else set() for pair in pairs]
        if not each or not all(names <= given <= others for given in each):
            expected = "a list of objects with user and assistant, and optionally source"
            raise DataError(place, f"found {shown(turns)} under 'texts', expected {expected}")
        pairs = [(pair["user"], pair["assistant"]) for pair in turns]
    elif spelling == "prompt" and isinstance(turns, list):  # TRL's, where answers in the prompt are not trained on
        completion = own.pop("completion")
        roles = [one.get("role") if isinstance(one, dict) else None for one in turns]
        if not isinstance(completion, list) or "user" not in roles:
            raise DataError(
                place,
                f"found {shown(turns)} under 'prompt' and {shown(completion)} under 'completion', expected two texts, "
                "or two lists of messages with role and content, the first with a question",
            )
        earlier = zip(turns, roles, strict=True)
        return [*({"loss": False} | _given(one) if role == "assistant" else one for one, role in earlier), *completion]
    else:
        question = _column_text(turns, spelling, place)
        if spelling == "instruction" and (given := own.pop("input", None)) not in (None, ""):
            question = f"{question}\n{_column_text(given, 'input', place)}"
        answer = _column_text(own.pop(QUESTIONS[spelling]), QUESTIONS[spelling], place)
        history = own.pop("history", None) or []  # ms-swift's and LLaMA-Factory's
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise DataError(place, f"found {shown(history)} under 'history', expected a list of [question, answer]")
        pairs = [*history, (question, answer)]
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _given(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}


def _column_text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{place}: {name!r}",
            f"found {shown(value)}, expected a string; what is none can be written into one, such as "
            f"columns.answer='{{{name}[0]}}' for the first of a list, or '{{{name}}}' for a number",
        )
    return value


def _own_message(message: Any, place: str) -> Any:
    """A message in our spelling; an invalid one is left for later checks."""
    if not isinstance(message, dict):
        return message
    own = dict(message)
    if "from" in own and own.get("role") is None and own.get("content") is None:  # ShareGPT's
        own |= {"role": own.pop("from"), "content": own.pop("value", None)}
    if isinstance(role := own.get("role"), str):
        own["role"] = SPEAKERS.get(role, role)
    if isinstance(calls := own.get("tool_calls"), list):
        own["tool_calls"] = list(map(_own_call, calls))
    if isinstance(content := own.get("content"), list):
        own["content"] = [_own_part(part, f"{place}, part {number}") for number, part in enumerate(content, start=1)]
    return own


def _own_call(call: Any) -> Any:
    """A tool call with its arguments as an object. Inference servers render OpenAI's text of JSON that way too."""
    call = without_nulls(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = parse_record(arguments) if arguments.strip() else {}
    own = {**function, "arguments": arguments}
    return {**call, "function": own} if "function" in call else own


def _own_part(part: Any, place: str) -> Any:
    """A content part with its text or medium under the name of its kind."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return part
    kind = _PART_TYPES.get(part["type"], part["type"])
    own = _given(part) | {"type": kind}
    if kind not in ("image", "video"):
        return own
    names = [name for name in (kind, f"{kind}_url", "url", "path") if name in own]
    if len(names) == 1:
        own = {kind if key == names[0] else key: value for key, value in own.items()}
        medium = own[kind]
        if isinstance(medium, dict) and medium.get("url") is not None:
            own |= _given(medium)
            own[kind] = own.pop("url")
    if own.get("detail") not in (None, "auto", "high"):  # OpenAI's "low" would be another image
        expected = "'auto' or 'high': image sizes are set by dataset.vision"
        raise DataError(place, f"found the detail {shown(own['detail'])}, expected {expected}")
    own.pop("detail", None)
    return own


class PixelLimits(NamedTuple):
    """Limits of one image's size in pixels; None for no limit of its own."""

    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class Conversation:
    """One sample as it was read."""

    sample_id: str  # file and line, "train.jsonl:12"
    messages: tuple[dict[str, Any], ...]  # with role and content, as a chat template takes them
    images: tuple[Media, ...] = ()  # in the order of their parts, as the videos
    videos: tuple[Video, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    limits: Mapping[int, PixelLimits] = field(default_factory=dict)  # by the image's index, for those with their own
    # Whether an assistant's message is trained on, by its index, for messages that say so themselves.
    losses: Mapping[int, bool] = field(default_factory=dict)


def conversation_of(record: Any, place: str, root: Path | MediaAccess) -> Conversation:
    """Validate a record in our own spelling and convert it to a conversation; a `DataError` for anything else.

    `root` is the folder that paths are relative to and must not leave, or a `MediaAccess`.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        found = shown(record) if not isinstance(record, dict) else f"{shown(messages)} under 'messages'"
        raise DataError(place, f"found {found}, expected an object with a list of messages")
    reader = _Messages(root)
    checked = tuple(reader.message(message, n, f"{place}: message {n + 1}") for n, message in enumerate(messages))
    roles = [message["role"] for message in checked]
    if "assistant" not in roles or roles[0] == "assistant":
        raise DataError(place, f"found the roles {', '.join(roles)}, expected an assistant's message after another one")
    tools = record.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(place, f"found {shown(tools)} under 'tools', expected a list of objects")
    images, videos = tuple(reader.images), tuple(reader.videos)
    return Conversation(place, checked, images, videos, tuple(tools) or None, reader.limits, reader.losses)


class _Messages:
    """Checks messages, and collects their images and videos."""

    def __init__(self, root: Path | MediaAccess) -> None:
        self._root = root
        self.images: list[Media] = []
        self.videos: list[Video] = []
        self.limits: dict[int, PixelLimits] = {}
        self.losses: dict[int, bool] = {}

    def message(self, message: Any, number: int, place: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise DataError(place, f"found {shown(message)}, expected an object with role and content")
        # Tables give every row the columns of all others, empty where a message has none.
        given = _given(message)
        if given.get("tool_calls"):
            given.setdefault("content", "")
        if not {"role", "content"} <= set(given) <= {"role", "content", *_OPTIONAL, *LOSS}:
            allowed = f"role and content, and {', '.join(sorted({*_OPTIONAL, *LOSS}))} where needed"
            raise DataError(place, f"found the keys {', '.join(map(str, given))}, expected {allowed}")
        role, content, reasoning, calls = (
            given.get(key) for key in ("role", "content", "reasoning_content", "tool_calls")
        )
        if role not in ROLES:
            raise DataError(place, f"found the role {role!r}, expected one of {', '.join(ROLES)}")
        for key in ("reasoning_content", "tool_calls", *LOSS):
            if given.get(key) and role != "assistant":
                problem = f"found {key!r} on a message of the role {role!r}"
                raise DataError(place, f"{problem}, expected it on the assistant's: of others it is not read")
        if not isinstance(reasoning, str | None):
            raise DataError(place, f"found {shown(reasoning)} under 'reasoning_content', expected a string")
        if not isinstance(calls, list | None):
            raise DataError(place, f"found {shown(calls)} under 'tool_calls', expected a list of objects")
        for at, call in enumerate(calls or (), start=1):
            where, function = f"{place}, tool call {at}", call.get("function", call) if isinstance(call, dict) else call
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise DataError(where, f"found {shown(function)}, expected an object with a name and arguments")
            if not isinstance(arguments := function.get("arguments", {}), dict):
                expected = "an object, or a string that contains one as JSON"
                raise DataError(where, f"found {shown(arguments)} under 'arguments', expected {expected}")
        losses = {key: given.pop(key) for key in LOSS if key in given}
        if len(losses) > 1:
            raise DataError(place, "found both 'loss' and 'weight', expected one of them")
        for key, value in losses.items():
            # Tables of numbers may have 1.0 for 1; in Python true is 1, too.
            if isinstance(value, bool) != (key == "loss") or value not in (0, 1):
                expected = "true or false" if key == "loss" else "0 or 1"
                raise DataError(place, f"found {shown(value)} under {key!r}, expected {expected}")
            if role == "assistant":
                self.losses[number] = bool(value)
        if isinstance(content, str):
            return given
        if not isinstance(content, list) or not content:
            raise DataError(place, f"found {shown(content)} as content, expected a string or a list of parts")
        parts = [self._part(part, f"{place}, part {at}") for at, part in enumerate(content, start=1)]
        return {**given, "content": parts}

    def _part(self, part: Any, place: str) -> dict[str, str]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PARTS:
            found = shown(part) if not isinstance(part, dict) else f"a part of type {kind!r}"
            raise DataError(place, f"found {found}, expected an object of type 'text', 'image' or 'video'")
        part = _given(part)
        value, is_list = part.get(kind), isinstance(part.get(kind), list)
        optional = {"text": (), "image": LIMITS, "video": (RATE,) if is_list else ()}[kind]
        if set(part) - {"type", kind, *optional}:
            needed = f", and {' and '.join(map(repr, optional))} where needed" if optional else " only"
            settings = "" if kind == "text" else f"; other limits are those of all {kind}s, in dataset.vision"
            raise DataError(
                place, f"found the keys {', '.join(map(str, part))}, expected 'type' and {kind!r}{needed}{settings}"
            )
        if kind == "text":
            if not isinstance(value, str):
                raise DataError(place, f"found {shown(value)} under 'text', expected a string")
        elif kind == "image":
            limits = PixelLimits(*(part.get(name) for name in LIMITS))
            for name, most in limits._asdict().items():
                if most is not None and (type(most) is not int or not 0 < most <= MOST_PIXELS):  # a bool is none
                    expected = f"a number of pixels up to {MOST_PIXELS:,}"
                    raise DataError(place, f"found {shown(most)} under {name!r}, expected {expected}")
            if limits != PixelLimits():
                self.limits[len(self.images)] = limits
            self.images.append(self._media(value, kind, place))
        else:
            self.videos.append(
                self._frames(value, part.get(RATE), place) if is_list else self._media(value, kind, place)
            )
        # A template reads only a part's type. Contents would only make the messages larger.
        return {"type": kind, kind: value if isinstance(value, str) and not value.startswith("data:") else ""}

    def _media(self, value: Any, kind: str, place: str) -> Media:
        if not isinstance(value, str | bytes) or not value:
            raise DataError(place, f"found {shown(value)} under {kind!r}, expected a path or bytes")
        return find(value, self._root, place) if isinstance(value, str) else value

    def _frames(self, frames: list[Any], fps: Any, place: str) -> FrameList:
        if not frames:
            raise DataError(place, "found a video of no frames, expected at least one")
        try:  # Qwen's own examples have it as text
            rate = float(fps) if isinstance(fps, int | float | str) and not isinstance(fps, bool) else 0
        except (ValueError, OverflowError):
            rate = 0
        if not 0 < rate < float("inf"):
            raise DataError(
                place,
                f"found {shown(fps)} as the {RATE!r} of a list of frames, expected how many are a second: next to "
                "'video' in a part of a content, or next to 'videos' a number, or a list of one for each video",
            )
        media = (self._media(frame, "video", f"{place}, frame {at}") for at, frame in enumerate(frames))
        return FrameList(tuple(media), rate)
