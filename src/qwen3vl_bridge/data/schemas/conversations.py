"""Conversations: every spelling of a record (docs/data.md lists them) converted to our own, and validated.

Our own is {"messages": [{"role": "user", "content": "..."}, ...]}. Roles are system, user, assistant and tool. Content
is a string, or a list of parts {"type": "text", "text": "..."}, {"type": "image", "image": MEDIUM} and {"type":
"video", "video": MEDIUM}, where a medium is a path, a URL, "data:...;base64,...", bytes, or {"bytes": ..., "path":
...}; a video may also be a list of images with "sample_fps".

Tables, and JSON written from them, have null for keys that an object lacks. Such keys count as missing everywhere, and
are removed from tools and their calls, which chat templates render whole; strings of JSON are taken as they are.
"""

from __future__ import annotations

import json
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
    local_path,
    pop_media,
    shown,
    stored,
    with_media,
    without_nulls,
)
from qwen3vl_bridge.io.parsing import parse_record

LOSS = ("loss", "weight")  # next to an assistant's message: whether it is trained on
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}
TURNS = ("messages", "conversations", "texts")
QUESTIONS = {"question": "answer", "query": "response", "prompt": "completion", "instruction": "output"}
KEYS = (*TURNS, "system", "tools", *MEDIA_KEYS, RATE, *QUESTIONS, *QUESTIONS.values(), "input", "history")
_KNOWN = frozenset(KEYS)
_OF_MESSAGES = (*LOSS, "reasoning_content", "tool_calls", *LIMITS)  # and of content parts


def _plain(key: object) -> str:
    return re.sub(r"[\W_]", "", str(key)).lower()


_MEANT = {_plain(key): key for key in (*KEYS, *_OF_MESSAGES)}
EXPECTED = (
    "'messages' or 'conversations', 'texts', a question with its answer ("
    + ", ".join(f"{question!r} and {answer!r}" for question, answer in QUESTIONS.items())
    + "), or the setting columns with the names that they have here"
)
_ADDRESSES = {"image_url": "image", "input_image": "image", "video_url": "video"}
_DETAILS = (None, "auto", "high")  # OpenAI's "low" would be another image


def messages_of(record: Any, place: str, *, placeholders: Placeholders = "media") -> Any:
    """Convert a record, which is never changed, to our own spelling; `place` is its position in the data, for messages.
    A value that is not an object, or has no messages, is returned for later checks.

    Raises:
        DataError: invalid turns, keys of several spellings or of none, placeholders that do not match the media next to
            them, or an unknown key that seems to hold media.
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
            join = f"write both into the question (columns.question='{{{key}}}\\n{{{spelling}}}'), or "
            raise DataError(
                place,
                f"found {key!r} next to {spelling!r}, with which it is not read, expected it next to "
                f"{' or '.join(map(repr, with_keys))}; {join if key == 'input' and spelling in QUESTIONS else ''}"
                f"leave it out (columns.ignore=[{key}])",
            )
    messages = own["messages"] = _pop_messages(own, spelling, place)
    if isinstance(own.get("tools"), str):
        try:
            own["tools"] = parse_record(own["tools"]) if own["tools"].strip() else None
        except ValueError as error:
            raise DataError(
                f"{place}: 'tools'", f"found a string that is not valid JSON ({error}), expected a list"
            ) from error
        if own["tools"] is None:
            del own["tools"]
    elif "tools" in own:
        own["tools"] = without_nulls(own["tools"])
    if not isinstance(messages, list):
        return own
    system = own.pop("system", None)
    if not isinstance(system, str | None):
        raise DataError(place, f"found {shown(system)} under 'system', expected a string")
    if system:
        if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
            raise DataError(place, "found both 'system' and a turn of it, expected one of them")
        messages = [{"role": "system", "content": system}, *messages]
    media = pop_media(own, place)
    own["messages"] = with_media(
        [_own_message(message, f"{place}: message {number}") for number, message in enumerate(messages, start=1)],
        media,
        place,
        keys=keys,
        placeholders=placeholders,
        in_front=spelling not in ("messages", "conversations"),
    )
    check_unread(record, _KNOWN, own["messages"], place)
    # Ignored, these would train on something else than the record means.
    for key in keys:
        if key not in _KNOWN and (meant := _MEANT.get(_plain(key))):
            expected = f"{meant!r} in a message or its content" if meant in _OF_MESSAGES else repr(meant)
            problem = f"found {key!r}, which is not read here, expected {expected}"
            raise DataError(place, f"{problem}; or leave it out (columns.ignore=[{key}])")
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
        sharegpt = isinstance(turns, list) and turns and isinstance(turns[0], dict) and "from" in turns[0]
        if spelling == "messages" and not sharegpt:
            return turns
        if not isinstance(turns, list) or not turns:
            raise DataError(place, f"found {shown(turns)} under 'conversations', expected a list of turns")
        return [_from_turn(turn, f"{place}: turn {number}") for number, turn in enumerate(turns, start=1)]
    if spelling == "texts":
        return _from_texts(turns, place)
    if spelling == "prompt" and isinstance(turns, list):
        return _from_prompt(turns, own.pop("completion"), place)
    question = _column_text(turns, spelling, place)
    if spelling == "instruction" and (given := own.pop("input", None)) not in (None, ""):
        question = f"{question}\n{_column_text(given, 'input', place)}"
    answer = _column_text(own.pop(QUESTIONS[spelling]), QUESTIONS[spelling], place)
    history = own.pop("history", None) or []  # ms-swift's and LLaMA-Factory's
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError(place, f"found {shown(history)} under 'history', expected a list of [question, answer]")
    earlier = [_pair(pair[0], pair[1], f"{place}: 'history' {number}") for number, pair in enumerate(history, start=1)]
    return [*(message for pair in earlier for message in pair), *_pair(question, answer, place)]


def _from_turn(turn: Any, place: str) -> dict[str, Any]:
    """One of ShareGPT's turns as a message."""
    given = {key for key, value in turn.items() if value is not None} if isinstance(turn, dict) else set()
    if {"role", "content"} <= given and not {"from", "value"} & given:
        role = turn["role"]
        return {**turn, "role": SPEAKERS.get(role, role) if isinstance(role, str) else role}
    if not isinstance(turn, dict) or not {"from", "value"} <= set(turn) or given - {"from", "value", *LOSS}:
        found = f"the keys {', '.join(map(str, turn))}" if isinstance(turn, dict) else shown(turn)
        raise DataError(place, f"found {found}, expected an object with only from and value, or role and content")
    speaker, value = turn["from"], turn["value"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise DataError(place, f"found the speaker {shown(speaker)}, expected one of {', '.join(SPEAKERS)}")
    if not isinstance(value, str):
        raise DataError(place, f"found {shown(value)} as value, expected a string")
    return {"role": SPEAKERS[speaker], "content": value, **{key: turn[key] for key in LOSS if key in turn}}


def _from_texts(texts: Any, place: str) -> list[dict[str, Any]]:
    """the_cauldron's pairs as messages."""
    if not isinstance(texts, list) or not texts:
        raise DataError(
            place, f"found {shown(texts)} under 'texts', expected a list of objects with user and assistant"
        )
    messages = []
    for number, pair in enumerate(texts, start=1):
        where = f"{place}: text {number}"
        given = {key for key, value in pair.items() if value is not None} if isinstance(pair, dict) else set()
        if not isinstance(pair, dict) or {"user", "assistant"} - {*pair} or given - {"user", "assistant", "source"}:
            found = f"the keys {', '.join(map(str, pair))}" if isinstance(pair, dict) else shown(pair)
            raise DataError(where, f"found {found}, expected an object with user and assistant, and optionally source")
        messages += _pair(pair["user"], pair["assistant"], where)
    return messages


def _from_prompt(prompt: list[Any], completion: Any, place: str) -> list[dict[str, Any]]:
    """TRL's two lists of messages as one; answers in the prompt are not trained on."""
    messages = [*prompt, *(completion if isinstance(completion, list) else [None])]
    if not all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in messages) or not any(
        one["role"] == "user" for one in prompt
    ):
        raise DataError(
            place,
            f"found {shown(prompt)} under 'prompt' and {shown(completion)} under 'completion', expected two texts, or "
            "two lists of messages with role and content, the first with a question",
        )
    return [*({"loss": False, **one} if one["role"] == "assistant" else one for one in prompt), *completion]


def _pair(question: Any, answer: Any, place: str) -> list[dict[str, Any]]:
    for value in (question, answer):
        if not isinstance(value, str):
            raise DataError(place, f"found {shown(value)}, expected a string")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _column_text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{place}: {name!r}",
            f"found {shown(value)}, expected a string; what is none can be written into one, such as "
            f"columns.answer='{{{name}[0]}}' for the first of a list, or '{{{name}}}' for a number",
        )
    return value


def _own_message(message: Any, place: str) -> Any:
    """A message with parts and tool calls in our spelling; invalid ones are left for later checks."""
    if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
        message = {**message, "tool_calls": [_own_call(call) for call in message["tool_calls"]]}
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = [_own_part(part, f"{place}, part {number}") for number, part in enumerate(content, start=1)]
    return {**message, "content": parts}


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
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return part
    given = {key: value for key, value in part.items() if value is not None}
    if kind in ("input_text", "output_text") and set(given) == {"type", "text"}:
        return {"type": "text", "text": given["text"]}
    if kind in _ADDRESSES:
        url = _url_of(given, "image_url" if kind == "input_image" else kind, place)
        return {"type": _ADDRESSES[kind], _ADDRESSES[kind]: local_path(url, place)}
    if kind not in ("image", "video"):
        return part
    for name in ("url", "path"):  # as in transformers' templates
        if set(given) == {"type", name}:
            return {"type": kind, kind: local_path(given[name], place)}

    def located(medium: Any) -> Any:
        if isinstance(medium, dict) and isinstance(medium.get("path"), str):
            return {**medium, "path": local_path(medium["path"], place)}
        return local_path(medium, place)

    medium = given.get(kind)
    if medium is None:
        return part
    return {**part, kind: list(map(located, medium)) if isinstance(medium, list) else located(medium)}


def _url_of(part: dict[str, Any], name: str, place: str) -> str:
    """The URL in a part of OpenAI's."""
    given = part.get(name)
    inner = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    url = inner.get("url") if isinstance(given, dict) else given
    detail = inner.get("detail", part.get("detail"))
    if not isinstance(url, str) or not set(part) <= {"type", name, "detail"} or not set(inner) <= {"url", "detail"}:
        raise DataError(place, f"found {shown(part)}, expected a URL as {name!r}, or as 'url' in it")
    if detail not in _DETAILS:
        raise DataError(
            place, f"found the detail {shown(detail)}, expected 'auto' or 'high': image sizes are set by dataset.vision"
        )
    return url


ROLES = ("system", "user", "assistant", "tool")
PARTS = ("text", "image", "video")
_OPTIONAL = {"reasoning_content", "tool_calls", "tool_call_id", "name"}


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
        found = _kind(record) if not isinstance(record, dict) else f"{_kind(messages)} under 'messages'"
        raise DataError(place, f"found {found}, expected an object with a list of messages")
    reader = _Messages(root)
    checked = tuple(reader.message(m, f"{place}: message {i}") for i, m in enumerate(messages, start=1))
    roles = [message["role"] for message in checked]
    if "assistant" not in roles or roles[0] == "assistant":
        raise DataError(place, f"found the roles {', '.join(roles)}, expected an assistant's message after another one")
    tools = record.get("tools")
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        raise DataError(place, f"found {_kind(tools)} under 'tools', expected a list of objects")
    losses = {
        number: loss
        for number, message in enumerate(messages)
        if (loss := _loss(message, f"{place}: message {number + 1}")) is not None
    }
    called = tuple(tools) if tools else None
    return Conversation(place, checked, tuple(reader.images), tuple(reader.videos), called, reader.limits, losses)


def _loss(message: dict[str, Any], place: str) -> bool | None:
    """Whether a message of the assistant is trained on; None if it does not say so itself."""
    given = {key: message[key] for key in LOSS if message.get(key) is not None}
    if len(given) > 1:
        raise DataError(place, "found both 'loss' and 'weight', expected one of them")
    for key, value in given.items():
        # Tables of numbers may have 1.0 for 1; in Python true is 1, too.
        if not (isinstance(value, bool) if key == "loss" else not isinstance(value, bool) and value in (0, 1)):
            expected = "true or false" if key == "loss" else "0 or 1"
            raise DataError(place, f"found {json.dumps(value, default=str)} under {key!r}, expected {expected}")
        if message["role"] == "assistant":
            return bool(value)
        if value:
            problem = f"found {key!r} on a message of the role {message['role']!r}"
            raise DataError(place, f"{problem}, expected it on the assistant's: only answers are trained on")
    return None


class _Messages:
    """Checks messages, and collects their images and videos."""

    def __init__(self, root: Path | MediaAccess) -> None:
        self._root = root
        self.images: list[Media] = []
        self.videos: list[Video] = []
        self.limits: dict[int, PixelLimits] = {}

    def message(self, message: Any, place: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise DataError(place, f"found {_kind(message)}, expected an object with role and content")
        # Tables give every row the columns of all others, empty where a message has none.
        given = {key: value for key, value in message.items() if value is not None or key == "content"}
        message = {key: value for key, value in given.items() if key not in LOSS}
        if message.get("content") is None and message.get("tool_calls"):
            message["content"] = ""
        if not {"role", "content"} <= set(message) <= {"role", "content", *_OPTIONAL}:
            allowed = f"role and content, and {', '.join(sorted({*_OPTIONAL, *LOSS}))} where needed"
            raise DataError(place, f"found the keys {', '.join(map(str, given))}, expected {allowed}")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise DataError(place, f"found the role {role!r}, expected one of {', '.join(ROLES)}")
        _check_optional(message, place)
        if isinstance(content, str):
            return message
        if not isinstance(content, list) or not content:
            raise DataError(place, f"found {_kind(content)} as content, expected a string or a list of parts")
        parts = [self._part(part, f"{place}, part {i}") for i, part in enumerate(content, start=1)]
        return {**message, "content": parts}

    def _part(self, part: Any, place: str) -> dict[str, str]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PARTS:
            found = _kind(part) if not isinstance(part, dict) else f"a part of type {kind!r}"
            raise DataError(place, f"found {found}, expected an object of type 'text', 'image' or 'video'")
        part = {key: value for key, value in part.items() if value is not None}
        value, keys = part.get(kind), set(part) - {"type", kind}
        frames = kind == "video" and isinstance(value, list)
        optional = [RATE] if frames else list(LIMITS) if kind == "image" else []
        if keys - set(optional):
            needed = f", and {' and '.join(map(repr, optional))} where needed" if optional else " only"
            settings = "" if kind == "text" else f"; other limits are those of all {kind}s, in dataset.vision"
            raise DataError(
                place, f"found the keys {', '.join(map(str, part))}, expected 'type' and {kind!r}{needed}{settings}"
            )
        if kind == "text":
            if not isinstance(value, str):
                raise DataError(place, f"found {_kind(value)} under 'text', expected a string")
        elif isinstance(value, list) and frames:
            self.videos.append(self._frames(value, part.get(RATE), place))
        else:
            if kind == "image" and keys:
                self.limits[len(self.images)] = _limits(part, place)
            (self.images if kind == "image" else self.videos).append(self._media(value, kind, place))
        # A template reads only a part's type. Contents would only make the messages larger.
        return {"type": kind, kind: value if isinstance(value, str) and not value.startswith("data:") else ""}

    def _media(self, value: Any, kind: str, place: str) -> Media:
        value = stored(value)
        if isinstance(value, str) and value:
            return find(value, self._root, place)
        if isinstance(value, bytes) and value:
            return value
        raise DataError(place, f"found {_kind(value)} under {kind!r}, expected a path or bytes")

    def _frames(self, frames: list[Any], fps: Any, place: str) -> FrameList:
        if not frames:
            raise DataError(place, "found a video of no frames, expected at least one")
        try:  # Qwen's own examples have it as text
            rate = float(fps) if isinstance(fps, (int, float, str)) and not isinstance(fps, bool) else 0
        except (ValueError, OverflowError):
            rate = 0
        if not 0 < rate < float("inf"):
            found = shown(fps) if isinstance(fps, str) else _kind(fps)
            raise DataError(
                place,
                f"found {found} as the {RATE!r} of a list of frames, expected how many are a second: next to 'video' "
                "in a part of a content, or next to 'videos' a number, or a list of one for each video",
            )
        return FrameList(
            tuple(self._media(frame, "video", f"{place}, frame {i}") for i, frame in enumerate(frames)), rate
        )


def _check_optional(message: dict[str, Any], place: str) -> None:
    """Refuse keys that templates would ignore: reasoning and calls of another type, or on other roles' messages."""
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
    if not isinstance(reasoning, (str, type(None))):
        raise DataError(place, f"found {_kind(reasoning)} under 'reasoning_content', expected a string")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DataError(place, f"found {_kind(calls)} under 'tool_calls', expected a list of objects")
    given = next((key for key in ("reasoning_content", "tool_calls") if message.get(key)), None)
    if given and message["role"] != "assistant":
        problem = f"found {given!r} on a message of the role {message['role']!r}"
        raise DataError(place, f"{problem}, expected it on the assistant's: of others it is not read")
    for number, call in enumerate(calls or (), start=1):
        where, function = f"{place}, tool call {number}", call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(where, f"found {shown(function)}, expected an object with a name and arguments")
        if not isinstance(arguments := function.get("arguments", {}), dict):
            expected = "an object, or a string that contains one as JSON"
            raise DataError(where, f"found {shown(arguments)} under 'arguments', expected {expected}")


def _limits(part: dict[str, Any], place: str) -> PixelLimits:
    """An image's own pixel limits."""
    limits = PixelLimits(*(part.get(name) for name in LIMITS))
    for name, value in limits._asdict().items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_PIXELS
        ):
            found = json.dumps(value, default=str)
            raise DataError(place, f"found {found} under {name!r}, expected a number of pixels up to {MOST_PIXELS:,}")
    least, most = limits
    if least is not None and most is not None and least > most:
        raise DataError(place, f"found 'min_pixels' {least} beyond 'max_pixels' {most}, expected it up to that")
    return limits


def _kind(value: Any) -> str:
    """Type of a JSON value, in JSON's terms."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    name = names.get(type(value), type(value).__name__)
    return f"an empty {name[2:].strip()}" if value in ({}, [], "") else name
