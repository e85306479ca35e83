"""Where a chat template writes the answers of a conversation, and what it leaves out."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.schemas.conversations import Conversation

Span = tuple[int, int]

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


EmptyThinking = Literal["prompt", "train"]

_APART = (
    "put reasoning under 'reasoning_content' and only the answer into the text; with an empty 'reasoning_content' the "
    "text is trained on as it is, with its think tags"
)


class Turns:
    """The assistant's turns of one conversation, in its rendered text."""

    def __init__(
        self,
        place: str,
        messages: Sequence[dict[str, Any]],
        text: str,
        render: Callable[..., str],
        closing: tuple[str, ...],
        empty: EmptyThinking,
    ) -> None:
        """Keep a conversation.

        Args:
            place: its position in the data, for messages.
            messages: its messages.
            text: the rendered conversation.
            render: the template: takes messages, `prompt` and `enable_thinking`.
            closing: possible end tokens of a turn.
            empty: whether an empty thinking block is trained on.
        """
        self._place, self._messages, self._text, self._render = place, messages, text, render
        self._closing, self._empty = closing, empty
        self._answer, self._reasoning = (_absent(text, name) for name in ("answer", "reasoning"))

    def span(self, number: int) -> Span:
        """The characters of a turn that are trained on, with its end token.

        Args:
            number: index of the message.

        Raises:
            DataError: the template does not render the turn as its reasoning before its answer, drops text of it, or
                renders the text around the turn depending on its contents.
        """
        where = f"{self._place}: message {number + 1}"
        head, tail = self._around(number, where)
        if not self._text.endswith(tail):
            raise self._refused(where, "what follows the answer", tail[:40])
        closed = next((token for token in self._closing if tail.lstrip().startswith(token)), None)
        if closed is None:
            raise DataError(where, f"the answer is followed by {tail[:20]!r}, expected a token that closes the turn")
        end = len(self._text) - len(tail) + tail.index(closed) + len(closed)
        opened = self._opened(number)
        empty = opened is not None and head.startswith(opened) and self._text.startswith(head)
        if opened is not None and self._text.startswith(opened) and (not empty or self._empty == "train"):
            start = self._start(opened, thinking=True, where=where)
        elif self._text.startswith(head):
            self._start(head, thinking=False, where=where)
            start = len(head)
        else:
            raise self._refused(where, "what precedes the answer", head[-40:])
        if start > len(self._text) - len(tail):
            raise self._refused(where, "what precedes the answer", head[-40:])
        before, answer = self._text[:start], self._text[start:end]
        check_answer(self._messages[number], before, answer, where, _APART, drops_reasoning=opened is None)
        return start, end

    def _around(self, number: int, where: str) -> tuple[str, str]:
        """The text before and after an answer without reasoning."""
        found = self._with(number, content=self._answer).split(self._answer)
        if len(found) != 2:
            problem = f"the chat template writes the answer {len(found) - 1} times, expected once"
            remedy = "leave it out with answers='last' or \"loss\": false, or give another template"
            raise DataError(where, f"{problem}; {remedy}")
        return found[0], found[1]

    def _opened(self, number: int) -> str | None:
        """The text before the reasoning of an answer; None if the template omits reasoning."""
        before, reasoning, _ = self._with(number, content=self._answer, reasoning_content=self._reasoning).partition(
            self._reasoning
        )
        return before if reasoning else None

    def _with(self, number: int, content: str, **beside: str) -> str:
        """The whole conversation, with another answer."""
        message = self._messages[number]
        marked = content if isinstance(message["content"], str) else [{"type": "text", "text": content}]
        other = {"role": message["role"], "content": marked, **beside}
        return self._render([*self._messages[:number], other, *self._messages[number + 1 :]])

    def _start(self, before: str, thinking: bool, where: str) -> int:
        """End of the generation prompt, in a text that ends where the turn begins to differ."""
        prompt = self._prompts[thinking]
        header = BLOCK.sub("", before)
        if not header.endswith(BLOCK.sub("", prompt)):
            raise self._refused(where, f"the prompt to generate it, with enable_thinking {thinking},", prompt)
        return len(before) if before.endswith(prompt) else len(header)

    @cached_property
    def _prompts(self) -> dict[bool, str]:
        """The generation prompts, with and without thinking."""
        last = max(number for number, message in enumerate(self._messages) if message["role"] == "assistant")
        asked = self._messages[:last]
        written = self._render(asked)
        prompts = {thinking: self._render(asked, prompt=True, enable_thinking=thinking) for thinking in (True, False)}
        for prompt in prompts.values():
            if not prompt.startswith(written) or prompt == written:
                raise DataError(
                    f"{self._place}: message {last + 1}",
                    f"the chat template ends the prompt to generate it with {prompt[-40:]!r}, expected the messages as "
                    f"without it, {written[-40:]!r}, and then the beginning of an answer: give the checkpoint another "
                    "template, which heeds add_generation_prompt",
                )
        return {thinking: prompt.removeprefix(written) for thinking, prompt in prompts.items()}

    def _refused(self, where: str, what: str, expected: str) -> DataError:
        return DataError(
            where,
            f"the chat template renders {what} as {expected!r}, and not so in the whole conversation; expected a "
            "template whose text around an answer does not depend on it: give the checkpoint's own, or train on only "
            "the last answer with answers='last'",
        )


def _absent(text: str, name: str) -> str:
    """A word that a text does not contain."""
    number = 0
    while (word := f"{name}-{number}-marked") in text:
        number += 1
    return word
