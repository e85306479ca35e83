"""Conversations as they are written down, checked.

What lives here: what a record of ours may hold, and refusing what is none. What may not: finding and reading records
(`data/sources/opening.py`), other people's spellings (`spellings.py`), pixels (`data/media/images.py`,
`data/media/videos.py`), tokens (`data/processing/encoding.py`).

A record is {"messages": [{"role": "user", "content": "..."}, ...]}. Roles are system, user, assistant and tool. Content
is a string, or a list of {"type": "text", "text": "..."}, {"type": "image", "image": "path"} and
{"type": "video", "video": "path"}. Beside a role there may be what a chat template reads: "reasoning_content",
"tool_calls", "name"; beside the messages, "tools".

A picture or a video is a path, an address ("https://...", where that is allowed), "data:...;base64,...", bytes, or
{"bytes": ..., "path": ...} as Hugging Face datasets have it. A video may also be a list of pictures, with how many of
them are a second: "sample_fps".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.images import FrameList, Media, MediaAccess, Video, find
from qwen3vl_bridge.data.schemas.placeholders import stored

ROLES = ("system", "user", "assistant", "tool")
PARTS = ("text", "image", "video")
_BESIDE = {"reasoning_content", "tool_calls", "tool_call_id", "name"}


@dataclass(frozen=True)
class Conversation:
    """One sample as it was read.

    Attributes:
        sample_id: file and line, "train.jsonl:12".
        messages: with role and content, as a chat template takes them.
        images: the pictures, in the order of their parts.
        videos: likewise.
        tools: what the model may call, as a chat template takes them, or None.
    """

    sample_id: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[Media, ...] = ()
    videos: tuple[Video, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None


def conversation_of(record: Any, place: str, root: Path | MediaAccess) -> Conversation:
    """A record as a conversation.

    Args:
        record: what the module describes.
        place: where it stands, for messages.
        root: folder that paths are relative to and may not leave, or where else media may come from, too.

    Raises:
        DataError: anything about it that is not as the module says.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        found = _kind(record) if not isinstance(record, dict) else f"{_kind(messages)} under 'messages'"
        raise DataError(place, f"found {found}, expected an object with a list of messages")
    media = _Media(root)
    checked = tuple(media.message(m, f"{place}: message {i}") for i, m in enumerate(messages, start=1))
    roles = [message["role"] for message in checked]
    if "assistant" not in roles or roles[0] == "assistant":
        raise DataError(place, f"found the roles {', '.join(roles)}, expected an assistant's answer to something")
    tools = record.get("tools")
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        raise DataError(place, f"found {_kind(tools)} under 'tools', expected a list of objects")
    return Conversation(place, checked, tuple(media.images), tuple(media.videos), tuple(tools) if tools else None)


class _Media:
    """Checks messages, and collects their pictures and videos."""

    def __init__(self, root: Path | MediaAccess) -> None:
        self._root = root
        self.images: list[Media] = []
        self.videos: list[Video] = []

    def message(self, message: Any, place: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise DataError(place, f"found {_kind(message)}, expected an object with role and content")
        # Tables give every row the columns of all others, empty where a message has none.
        message = {key: value for key, value in message.items() if value is not None or key == "content"}
        if message.get("content") is None and message.get("tool_calls"):
            message["content"] = ""
        if not {"role", "content"} <= set(message) <= {"role", "content", *_BESIDE}:
            allowed = f"role and content, and {', '.join(sorted(_BESIDE))} where needed"
            raise DataError(place, f"found the keys {', '.join(map(str, message))}, expected {allowed}")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise DataError(place, f"found the role {role!r}, expected one of {', '.join(ROLES)}")
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
        if keys - ({"sample_fps"} if frames else set()):
            raise DataError(place, f"found the keys {', '.join(map(str, part))}, expected 'type' and {kind!r} alone")
        if kind == "text":
            if not isinstance(value, str):
                raise DataError(place, f"found {_kind(value)} under 'text', expected a string")
        elif frames:
            self.videos.append(self._frames(value, part.get("sample_fps"), place))
        else:
            (self.images if kind == "image" else self.videos).append(self._media(value, kind, place))
        # A template asks what kind a part is. Contents would only make the messages heavy.
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
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < float("inf"):
            raise DataError(
                place, f"found {_kind(fps)} as the 'sample_fps' of a list of frames, expected how many are a second"
            )
        return FrameList(
            tuple(self._media(frame, "video", f"{place}, frame {i}") for i, frame in enumerate(frames)), fps
        )


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    name = names.get(type(value), type(value).__name__)
    return f"an empty {name[2:].strip()}" if value in ({}, [], "") else name
