"""Renders conversations with a checkpoint's chat template, locates their answers, and refuses what it would leave out.

Trained text is located by rendering, not by searching, nor by knowing a release's template: the whole conversation is
rendered once more with markers in place of an answer and its reasoning, and what surrounds them surrounds the answer.
(A prefix of a conversation may render differently by itself: some templates write reasoning only after the last
question.) What precedes an answer has to end as the prompt to generate it does.

Whether prompts ask for thinking follows from the sample: they do if an answer that is trained on has reasoning. Some
templates write another system prompt then.

A template does not report what it does not read: reasoning, tools, a system prompt after the first message. Nor does it
report text that it drops, as templates with thinking do where they split an answer at its think tags.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.schemas.conversations import Conversation

EmptyThinking = Literal["prompt", "train"]
Span = tuple[int, int]

# What to do about a template in which answers cannot be located, by the text that fails: the whole conversation, or
# an answer that is followed by others; and about thinking within an answer.
_ANOTHER = "give the checkpoint another chat template, which reads 'reasoning_content' if it writes thinking"
_WHOLE = f"mend the sample, leave it out with on_bad='drop', or {_ANOTHER}"
_EARLIER = f"train on only the last answer with answers='last', leave this one out with \"loss\": false, or {_ANOTHER}"
_REASONING = (
    "put reasoning under 'reasoning_content' and only the answer into the text; with an empty 'reasoning_content' the "
    "text is trained on as it is, with its think tags"
)
_BLOCK = re.compile(r"<think>\s*(</think>\s*)?\Z")  # at the end of a prompt, open or empty
_EMPTY_BLOCK = re.compile(r"\A\s*<think>\s*</think>")
_MEDIUM = "\0"  # for an image or a video, or no text

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
# Fields that a template may ignore, by their names in messages: a conversation with the field, its tools, and what to
# do if it is ignored.
_FIELDS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]] = {
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


def texts_of(content: str | list[dict[str, Any]]) -> list[str]:
    """The texts of a content, one of each part; empty for images and videos."""
    return [content] if isinstance(content, str) else [part.get("text", "") for part in content]


class ChatTemplate:
    """One processor's chat template. Picklable, for data-loading workers."""

    def __init__(self, processor: Any, empty_thinking: EmptyThinking = "prompt", **settings: Any) -> None:
        """Keep a processor; arguments and errors as for `Encoder`. `settings`: variables of the template, by name."""
        self._processor = processor
        self._empty: EmptyThinking = empty_thinking
        self._reads_reasoning = "reasoning_content" in str(processor.chat_template)
        self._special = tuple(processor.tokenizer.all_special_tokens)
        self._ignored: dict[str, bool] = {}  # by field
        self._prompts: dict[bool, str] = {}  # by whether they ask for thinking
        self.settings = {name: value for name, value in settings.items() if value is not None}
        if empty_thinking != "prompt" and not self._reads_reasoning:
            raise ValueError(
                f"empty_thinking is {empty_thinking!r}, but the chat template reads no 'reasoning_content' and writes "
                "no thinking; expected 'prompt'"
            )
        for name, value in self.settings.items():
            if name not in str(processor.chat_template):
                raise ValueError(f"{name} is {value!r}, but the chat template does not read it; expected None")
        if self.settings:
            try:
                self._apply([_ASK, _ANSWER], enable_thinking=True)
            except Exception as error:  # a template is a program, and may refuse a value
                given = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
                raise ValueError(f"the chat template refuses {given}: {error}") from error

    def _apply(self, messages: Sequence[dict[str, Any]], tools: Any = None, **variables: Any) -> str:
        """Messages as text."""
        # transformers changes messages in place, and warns each time about variables that a template does not read.
        copies, tools = copy.deepcopy((list(messages), tools))
        template = str(self._processor.chat_template)
        known = {name: value for name, value in (variables | self.settings).items() if name in template}
        return self._processor.apply_chat_template(copies, tools=tools, tokenize=False, **known)

    def _render(self, conversation: Conversation, messages: Sequence[dict[str, Any]], thinking: bool) -> str:
        try:
            return self._apply(messages, conversation.tools, enable_thinking=thinking)
        except Exception as error:  # a template is a program, and runs on arbitrary records
            raise DataError(conversation.sample_id, f"the chat template refuses it: {error}; {_WHOLE}") from error

    def check_fields(self, conversation: Conversation) -> None:
        """Refuse a conversation with fields that the template ignores."""
        for field, where in _fields_of(conversation):
            messages, tools, remedy = _FIELDS[field]
            if field not in self._ignored:
                try:
                    self._ignored[field] = _MARKER not in self._apply(messages, tools)
                except Exception:  # what a template refuses, it also refuses in the sample
                    self._ignored[field] = False
            if self._ignored[field]:
                raise DataError(
                    where,
                    f"found {field}, which the chat template does not write: the sample would be trained on without; "
                    f"{remedy}",
                )

    def is_plain(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Whether answers have the same tokens without regard to their positions, and no think tags that split them."""
        # A tokenizer joins the newline that ends a prompt only with white space after it.
        if self._empty == "train" or not self._prompt(True).endswith("\n"):
            return False
        for message in messages:
            text, reasoning = "".join(texts_of(message["content"])), message.get("reasoning_content") or "."
            if not text[:1].strip() or not reasoning[:1].strip() or "</think>" in text:
                return False
        return True

    @cached_property
    def _splits(self) -> bool:
        """Whether reasoning inside an answer is taken out of it."""
        inside = f"{_MARKER}</think>b"
        try:
            return inside not in self._apply([_ASK, {"role": "assistant", "content": inside}])
        except Exception:  # what a template refuses, it also refuses in the sample
            return False

    def _prompt(self, thinking: bool) -> str:
        """What follows the messages in a prompt to generate an answer; empty if that cannot be told."""
        if thinking not in self._prompts:
            try:
                asked, prompt = (
                    self._apply([_ASK], enable_thinking=thinking, add_generation_prompt=asks) for asks in (False, True)
                )
                self._prompts[thinking] = prompt.removeprefix(asked) if prompt.startswith(asked) else ""
            except Exception:  # what a template refuses, it also refuses in the sample
                self._prompts[thinking] = ""
        return self._prompts[thinking]

    def _reasons(self, message: dict[str, Any]) -> bool:
        """Whether a message has reasoning, next to its text or, if the template reads that, in it."""
        beside = message.get("reasoning_content")
        if isinstance(beside, str):
            return bool(beside.strip())
        inside, closed, _ = "".join(texts_of(message["content"])).partition("</think>")
        return bool(closed and inside.rpartition("<think>")[2].strip()) and self._splits

    def _asks(self, conversation: Conversation, numbers: Sequence[int]) -> bool:
        return self._empty == "train" or any(self._reasons(conversation.messages[number]) for number in numbers)

    def text(self, conversation: Conversation, numbers: Sequence[int]) -> str:
        """The whole text, in which the messages of these numbers are trained on."""
        return self._render(conversation, conversation.messages, self._asks(conversation, numbers))

    def answers(self, conversation: Conversation, numbers: Sequence[int]) -> tuple[str, list[Span]]:
        """The whole text, and the spans in it of the messages of these numbers, each with its reasoning and its end
        token; a `DataError` if one cannot be located, or the template drops text of it.
        """
        text, thinking = self.text(conversation, numbers), self._asks(conversation, numbers)
        return text, [self._span(conversation, text, number, thinking) for number in numbers]

    def _span(self, conversation: Conversation, text: str, number: int, thinking: bool) -> Span:
        """The characters of an answer."""
        message, where = conversation.messages[number], f"{conversation.sample_id}: message {number + 1}"
        is_last = number + 1 == len(conversation.messages)

        def refused(part: str, expected: str) -> DataError:
            return DataError(
                where,
                f"the chat template renders {part} as {expected!r}, and not so in the whole conversation; expected "
                f"text around an answer that does not depend on it: {_ANOTHER if is_last else _EARLIER}",
            )

        before, is_written, after = self._around(conversation, text, number, thinking, where)
        if not text.startswith(before) or len(before) + len(after) > len(text):
            raise refused("what precedes the answer", before[-40:])
        if not text.endswith(after):
            raise refused("what follows the answer", after[:40])
        if not (prompt := self._prompt(thinking)):
            raise DataError(
                where,
                "the chat template, given a user's message alone, writes no beginning of an answer behind it where "
                "add_generation_prompt asks for that; give the checkpoint another chat template, which does",
            )
        special = [token for token in self._special if after.lstrip().startswith(token)]
        if not special or prompt.lstrip().startswith(special[0]):  # that begins the next turn
            raise DataError(where, f"the answer is followed by {after[:20]!r}, expected a token that closes the turn")
        end = len(text) - len(after) + after.index(special[0]) + len(special[0])
        # Both may end in a thinking block, open or empty.
        header, asks = (_BLOCK.sub("", words) for words in (before, prompt))
        block = prompt.removeprefix(asks)
        # Templates that write reasoning write no block before earlier answers.
        needs_block = block and (is_last or not (self._reads_reasoning or self._splits))
        if not header.endswith(asks) or (needs_block and header == before):
            raise refused(f"the prompt to generate it, with enable_thinking {thinking},", prompt)
        start = len(before)
        if is_written or self._empty == "train":
            start = len(header) + (len(block) if before.startswith(block, len(header)) else 0)
        remedy = _REASONING if self._reads_reasoning else _ANOTHER
        is_dropped = self._reasons(message) and not is_written and not is_last
        _check_answer(message, text[:start], text[start:end], where, remedy, is_dropped)
        return start, end

    def _around(
        self, conversation: Conversation, text: str, number: int, thinking: bool, where: str
    ) -> tuple[str, bool, str]:
        """What precedes an answer, or its reasoning if that is written; whether it is; and what follows the answer."""
        # Words that the text does not contain.
        answer, reasoning = (
            next(word for n in itertools.count() if (word := f"{name}-{n}-marked") not in text)
            for name in ("answer", "reasoning")
        )
        messages, content, beside = conversation.messages, answer, {}
        if self._reasons(messages[number]):
            if isinstance(messages[number].get("reasoning_content"), str):
                beside = {"reasoning_content": reasoning}
            else:
                content = f"<think>\n{reasoning}\n</think>\n\n{answer}"
        parts = content if isinstance(messages[number]["content"], str) else [{"type": "text", "text": content}]
        other = {"role": "assistant", "content": parts, **beside}
        marked = self._render(conversation, [*messages[:number], other, *messages[number + 1 :]], thinking)
        if (count := marked.count(answer)) != 1:
            problem = f"the chat template writes the answer {count} times, expected once"
            remedy = "leave it out with answers='last' or \"loss\": false, or give another template"
            raise DataError(where, f"{problem}; {remedy}")
        head, after = marked.split(answer)
        before, is_written, _ = head.partition(reasoning)
        return before, bool(is_written), after


def _check_answer(
    message: dict[str, Any], prompt: str, answer: str, where: str, remedy: str, drops_reasoning: bool
) -> None:
    """Refuse an assistant's message of which the template writes only a part: `answer` after `prompt`.

    `drops_reasoning`: the template omits reasoning from this turn, as from those before the last question.
    """
    texts, reasoning = texts_of(message["content"]), message.get("reasoning_content")
    before, _, rest = "".join(text or _MEDIUM for text in texts).partition("<think>")
    inside, closed, behind = rest.partition("</think>")
    # If reasoning is given separately, tags in the text are text.
    is_inline = closed and not before.strip() and not isinstance(reasoning, str)
    if is_inline:
        block = _BLOCK.search(prompt)
        answer = (block[0] if block else "") + answer
        if inside.strip() and not drops_reasoning:
            texts = ["<think>", *inside.split(_MEDIUM), "</think>", *behind.split(_MEDIUM)]
        else:
            texts, answer = behind.split(_MEDIUM), _EMPTY_BLOCK.sub("", answer)
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


def _fields_of(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Fields of a conversation that a template may ignore, with their position."""
    if conversation.tools:
        yield "tools", conversation.sample_id
    for number, message in enumerate(conversation.messages):
        where = f"{conversation.sample_id}: message {number + 1}"
        has_text = any(map(str.strip, texts_of(message["content"])))  # its images are counted elsewhere
        if message["role"] == "system" and has_text:
            yield "a system prompt after the first message" if number else "a system prompt", where
        if message["role"] == "tool" and has_text:
            yield "a tool's answer", where
        if (message.get("reasoning_content") or "").strip():
            yield "reasoning_content", where
        if message.get("tool_calls"):
            yield "tool_calls", where
