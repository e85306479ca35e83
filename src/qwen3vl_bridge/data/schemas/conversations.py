"""Validation of conversations.

A record is {"messages": [{"role": "user", "content": "..."}, ...]}. Roles are system, user, assistant and tool. Content
is a string, or a list of {"type": "text", "text": "..."}, {"type": "image", "image": "path"} and {"type": "video",
"video": "path"}. A message may also have keys that a chat template reads: "reasoning_content", "tool_calls", "name"; a
record may also have "tools". A tool call is {"name": ..., "arguments": {...}}, or that under "function".

An image may have its own pixel limits, as in Qwen's message format: "min_pixels" and "max_pixels". They replace those
of the checkpoint and of `dataset.vision`; a limit that is not given is kept. A video has no limits of its own.

An assistant's message may say whether it is trained on: "loss": true or false, or "weight": 1 or 0. This has precedence
over `answers`, which decides for messages without it: with `answers="last"`, an earlier one with "loss": true is
trained on too, and a last one with "loss": false is not. Messages of other roles are never trained on, and other values
on them are refused.

An image or a video is a path, a URL ("https://...", if that is allowed), "data:...;base64,...", bytes, or {"bytes":
..., "path": ...} as in Hugging Face datasets. A video may also be a list of images, with their frames per second,
"sample_fps", a number or its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.images import MOST_PIXELS
from qwen3vl_bridge.data.media.media_access import FrameList, Media, MediaAccess, Video, find
from qwen3vl_bridge.data.schemas.placeholders import LIMITS, RATE, shown, stored
from qwen3vl_bridge.data.schemas.spellings import LOSS

ROLES = ("system", "user", "assistant", "tool")
PARTS = ("text", "image", "video")
_OPTIONAL = {"reasoning_content", "tool_calls", "tool_call_id", "name"}


class PixelLimits(NamedTuple):
    """Limits of one image's size in pixels; None for no limit of its own."""

    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class Conversation:
    """One sample as it was read.

    Attributes:
        sample_id: file and line, "train.jsonl:12".
        messages: with role and content, as a chat template takes them.
        images: in the order of their parts, as the videos.
        limits: pixel limits by the image's index, for images that have their own.
        losses: whether an assistant's message is trained on, by its index, for messages that say so themselves.
    """

    sample_id: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[Media, ...] = ()
    videos: tuple[Video, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    limits: Mapping[int, PixelLimits] = field(default_factory=dict)
    losses: Mapping[int, bool] = field(default_factory=dict)


def conversation_of(record: Any, place: str, root: Path | MediaAccess) -> Conversation:
    """Validate a record and convert it to a conversation.

    Args:
        record: as described in the module's docstring.
        place: its position in the data, for messages.
        root: folder that paths are relative to and must not leave, or a `MediaAccess`.

    Raises:
        DataError: anything that differs from the module's description.
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
