"""Conversations on disk: JSON lines of `messages`, checked.

What lives here: finding a line, reading it, refusing what is not a conversation. What may not: pixels (`media.py`),
tokens and templates (`encode.py`).

A line is {"messages": [{"role": "user", "content": "..."}, ...]}. Roles are system, user and assistant. Content is a
string, or a list of {"type": "text", "text": "..."} and {"type": "image", "image": "path"}.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DataError
from .media import find

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Conversation:
    """One sample as it was read.

    Attributes:
        sample_id: file and line, "train.jsonl:12".
        messages: with role and content, as a chat template takes them.
        images: the pictures' files, in the order of their parts.
    """

    sample_id: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[Path, ...]


class ConversationFile:
    """A file of conversations, one a line. Holds where lines begin, not the lines."""

    def __init__(self, path: str | Path, media_root: str | Path | None = None) -> None:
        """Find the lines. Blank ones are none, but count as lines.

        Args:
            path: the JSONL file.
            media_root: folder that picture paths are relative to and may not leave; the file's own by default.

        Raises:
            DataError: no such file or folder, or a file without lines.
        """
        self.path = Path(path)
        self.media_root = Path(media_root) if media_root is not None else self.path.parent
        if not self.path.is_file():
            raise DataError(str(self.path), "there is no such file, expected JSON lines of conversations")
        if not self.media_root.is_dir():
            raise DataError(str(self.media_root), "there is no such folder, expected the media root")
        self._offsets, self._lines = array("Q"), array("Q")
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
        self.size = offset
        if not self._offsets:
            raise DataError(str(self.path), "found no lines, expected one conversation a line")

    def __len__(self) -> int:
        return len(self._offsets)

    def sample_id(self, index: int) -> str:
        """File and line of a conversation."""
        return f"{self.path.name}:{self._lines[index]}"

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation.

        Raises:
            DataError: anything about the line that is not as the module says.
        """
        place = self.sample_id(index)
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(place, f"found bytes that are no UTF-8 ({error})") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(place, f"found no valid JSON ({error}), expected one conversation") from error
        return _conversation(record, place, self.media_root)


def _conversation(record: Any, place: str, root: Path) -> Conversation:
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        found = _kind(record) if not isinstance(record, dict) else f"{_kind(messages)} under 'messages'"
        raise DataError(place, f"found {found}, expected an object with a list of messages")
    if "tools" in record:
        raise DataError(place, "found 'tools', which this reader does not pass on to the chat template yet")
    images: list[Path] = []
    checked = tuple(_message(m, f"{place}: message {i}", root, images) for i, m in enumerate(messages, start=1))
    roles = [message["role"] for message in checked]
    if "assistant" not in roles or roles[0] == "assistant":
        raise DataError(place, f"found the roles {', '.join(roles)}, expected an assistant's answer to something")
    return Conversation(place, checked, tuple(images))


def _message(message: Any, place: str, root: Path, images: list[Path]) -> dict[str, Any]:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        found = f"the keys {', '.join(map(str, message))}" if isinstance(message, dict) else _kind(message)
        raise DataError(place, f"found {found}, expected an object with role and content alone")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise DataError(place, f"found the role {role!r}, expected one of {', '.join(ROLES)}")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list) or not content:
        raise DataError(place, f"found {_kind(content)} as content, expected a string or a list of parts")
    parts = [_part(part, f"{place}, part {i}", root, images) for i, part in enumerate(content, start=1)]
    return {"role": role, "content": parts}


def _part(part: Any, place: str, root: Path, images: list[Path]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "video":
        raise DataError(place, "found a video, which this reader does not decode yet, expected text or image")
    if kind not in ("text", "image"):
        found = _kind(part) if not isinstance(part, dict) else f"a part of type {kind!r}"
        raise DataError(place, f"found {found}, expected an object of type 'text' or 'image'")
    if not isinstance(part.get(kind), str) or set(part) != {"type", kind}:
        raise DataError(place, f"found the keys {', '.join(part)}, expected 'type' and a string as {kind!r} alone")
    if kind == "image":
        images.append(find(part["image"], root, place))
    return dict(part)


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return f"an empty {names[type(value)][2:].strip()}" if value in ({}, [], "") else names[type(value)]
