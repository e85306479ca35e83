"""Detects fields of a conversation that a chat template ignores, by rendering them.

What lives here: for each field that some templates ignore, a small conversation with it, rendered once with a marker as
its value; refusing samples with ignored fields. What may not: images, which are counted among the tokens
(`tokenization.py`); positions of answers (`encoding.py`, `thinking.py`).

A template does not report what it does not read: reasoning, tools, a system prompt after the first message. A sample
would be trained on without it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.schemas.conversations import Conversation

_MARKER = "unwritten0marker"  # letters that no template filter changes
_ASK, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"c": {"type": "string", "description": "d"}}, "required": ["c"]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def _call(name: str) -> dict[str, Any]:
    called = {"type": "function", "id": "0", "function": {"name": name, "arguments": {"c": "d"}}}
    return {"role": "assistant", "content": "", "tool_calls": [called]}


_SYSTEM = {"role": "system", "content": _MARKER}
_OTHER = "give the checkpoint a chat template that writes it"
_TAKEN_OUT = f"take it out of the record, or {_OTHER}"
# By name in messages: a conversation with the field, its tools, and what to do if it is ignored.
_SMALL: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]] = {
    "tools": ([_ASK, _ANSWER], [_tool(_MARKER)], f"leave them out (columns.ignore=[tools]), or {_OTHER}"),
    "a system prompt": ([_SYSTEM, _ASK, _ANSWER], None, _TAKEN_OUT),
    "a system prompt after the first message": (
        [_ASK, _ANSWER, _SYSTEM, _ASK, _ANSWER],
        None,
        f"join it to the first message's or to the question after it, or {_OTHER}",
    ),
    "reasoning_content": ([_ASK, {**_ANSWER, "reasoning_content": _MARKER}], None, _TAKEN_OUT),
    "tool_calls": ([_ASK, _call(_MARKER)], [_tool("e")], _TAKEN_OUT),
    "a tool's answer": (
        [_ASK, _call("e"), {"role": "tool", "content": _MARKER, "name": "e", "tool_call_id": "0"}, _ANSWER],
        [_tool("e")],
        _TAKEN_OUT,
    ),
}


class Unwritten:
    """Fields that one processor's template ignores. Picklable, for data-loading workers."""

    def __init__(self, processor: Any) -> None:
        """Keep a processor; nothing is rendered before the first check."""
        self._processor = processor
        self._left_out: dict[str, bool] = {}

    def check(self, conversation: Conversation) -> None:
        """Refuse a conversation of which the template renders only a part.

        Raises:
            DataError: it has fields that the template ignores.
        """
        for what, where in _parts(conversation):
            if what not in self._left_out:
                self._left_out[what] = self._leaves_out(what)
            if self._left_out[what]:
                raise DataError(
                    where,
                    f"found {what}, which the chat template does not write: the sample would be trained on without; "
                    f"{_SMALL[what][2]}",
                )

    def _leaves_out(self, what: str) -> bool:
        messages, tools, _ = _SMALL[what]
        copies, tools = copy.deepcopy((messages, tools))  # transformers changes messages in place
        try:
            text = self._processor.apply_chat_template(copies, tools=tools, tokenize=False)
        except Exception:  # a template is a program; what it refuses, it also refuses in the sample
            return False
        return _MARKER not in text


def _parts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Fields of a conversation that a template may ignore, with their position."""
    if conversation.tools:
        yield "tools", conversation.sample_id
    for number, message in enumerate(conversation.messages):
        where = f"{conversation.sample_id}: message {number + 1}"
        if message["role"] == "system" and _says(message["content"]):
            yield "a system prompt after the first message" if number else "a system prompt", where
        if message["role"] == "tool" and _says(message["content"]):
            yield "a tool's answer", where
        if (message.get("reasoning_content") or "").strip():
            yield "reasoning_content", where
        if message.get("tool_calls"):
            yield "tool_calls", where


def _says(content: str | list[dict[str, Any]]) -> bool:
    """Whether a content has text. Its images are counted elsewhere."""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return any(map(str.strip, texts))
