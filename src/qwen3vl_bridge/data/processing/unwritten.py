"""Detects fields of a conversation that a chat template ignores, by rendering them, and text of answers that it drops.

What lives here: for each field that some templates ignore, a small conversation with it, rendered once with a marker as
its value; refusing samples with ignored fields; refusing answers that are not written whole. What may not: images,
which are counted among the tokens (`tokenization.py`); positions of answers (`encoding.py`, `thinking.py`).

A template does not report what it does not read: reasoning, tools, a system prompt after the first message. A sample
would be trained on without it. Nor does it report text that it drops: templates with thinking split an answer at its
think tags, keep one piece as reasoning and the last as the answer, and drop the others. White space at the ends of a
text is not counted: such templates trim it.
"""

from __future__ import annotations

import copy
import re
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
# A thinking block at the end of a prompt, open or empty.
BLOCK = re.compile(r"<think>\s*(</think>\s*)?\Z")
_MEDIUM = "\0"  # for an image or a video, or no text
_EMPTY = re.compile(r"\A\s*<think>\s*</think>")
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


def check_answer(
    message: dict[str, Any], prompt: str, answer: str, where: str, remedy: str, drops_reasoning: bool = False
) -> None:
    """Refuse an answer of which the template writes only a part.

    Args:
        message: the assistant's message.
        prompt: the rendered text up to what is trained on.
        answer: the rendered text that is trained on.
        where: the message's position, for messages.
        remedy: what to do about the template.
        drops_reasoning: whether the template omits reasoning from this turn, as from those before the last question.

    Raises:
        DataError: it lacks text of the message.
    """
    texts, reasoning = texts_of(message["content"]), message.get("reasoning_content")
    before, _, rest = "".join(text or _MEDIUM for text in texts).partition("<think>")
    inside, closed, behind = rest.partition("</think>")
    # If reasoning is given separately, tags in the text are text.
    is_inline = closed and not before.strip() and not isinstance(reasoning, str)
    if is_inline:
        block = BLOCK.search(prompt)
        answer = (block[0] if block else "") + answer
        if inside.strip() and not drops_reasoning:
            texts = ["<think>", *inside.split(_MEDIUM), "</think>", *behind.split(_MEDIUM)]
        else:
            texts, answer = behind.split(_MEDIUM), _EMPTY.sub("", answer)
    elif reasoning and not drops_reasoning:
        texts = [reasoning, *texts]
    at = 0
    for text in map(str.strip, texts):
        found = answer.find(text, at)
        if found < 0 or (is_inline and _MEDIUM not in rest and answer[at:found].strip()):
            raise DataError(
                where,
                f"found {text[:60]!r} in the answer, of which the chat template writes {answer[:60]!r}, expected it "
                f"whole; {remedy}",
            )
        at = found + len(text)


def texts_of(content: str | list[dict[str, Any]]) -> list[str]:
    """The texts of a content, one of each part; empty for images and videos."""
    return [content] if isinstance(content, str) else [part.get("text", "") for part in content]


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
    return any(map(str.strip, texts_of(content)))
