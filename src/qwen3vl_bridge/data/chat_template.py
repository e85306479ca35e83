"""Renders conversations with a checkpoint's chat template, locates their answers, and refuses what it would leave out.

Trained text is located by rendering, not by searching: the messages before an answer are rendered with the generation
prompt, which is the model's input; the rest of the turn up to its end token is the answer. Templates with thinking
render reasoning only after the last question, so a prefix of a conversation renders differently by itself. There a turn
is located by rendering the whole conversation with a marker in place of the answer, and another in place of its
reasoning. Whether the prompt asks for thinking follows from the sample: it does if it has reasoning.

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

# What to do about a template in which answers cannot be located, by the text that fails: the whole conversation, the
# prompt of an answer, or an answer that is followed by others; and about thinking within an answer.
_ANOTHER = "give the checkpoint another chat template, which reads 'reasoning_content' if it writes thinking"
_WHOLE = f"mend the sample, leave it out with on_bad='drop', or {_ANOTHER}"
_ITS_PROMPT = f"{_ANOTHER}, as released ones do"
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

    def __init__(self, processor: Any, empty_thinking: EmptyThinking = "prompt") -> None:
        """Keep a processor; arguments and errors as for `Encoder`. Nothing is rendered yet."""
        self._processor = processor
        self._empty: EmptyThinking = empty_thinking
        self._thinks = "reasoning_content" in str(processor.chat_template)
        self._closing = tuple(processor.tokenizer.all_special_tokens)  # possible ends of a turn
        self._ignored: dict[str, bool] = {}  # by field
        if empty_thinking != "prompt" and not self._thinks:
            raise ValueError(
                f"empty_thinking is {empty_thinking!r}, but the chat template reads no 'reasoning_content' and writes "
                "no thinking; expected 'prompt'"
            )

    def render(
        self, conversation: Conversation, messages: Sequence[dict[str, Any]], prompt: bool = False, **reads: Any
    ) -> str:
        """Messages of a conversation as text; `reads` are further variables, such as `enable_thinking`."""
        try:
            # transformers changes messages in place.
            copies, tools = copy.deepcopy((list(messages), conversation.tools))
            # transformers warns each time about variables that a template does not read; Qwen3-VL's always has thinking
            # on.
            known = {name: value for name, value in reads.items() if name in str(self._processor.chat_template)}
            settings = {"tokenize": False, "add_generation_prompt": prompt, **known}
            return self._processor.apply_chat_template(copies, tools=tools, **settings)
        except Exception as error:  # a template is a program, and runs on arbitrary records
            whole = len(messages) == len(conversation.messages)
            part, remedy = ("it", _WHOLE) if whole else (f"its first {len(messages)} messages by themselves", _EARLIER)
            raise DataError(conversation.sample_id, f"the chat template refuses {part}: {error}; {remedy}") from error

    def check_fields(self, conversation: Conversation) -> None:
        """Refuse a conversation with fields that the template ignores."""
        for field, where in _fields_of(conversation):
            messages, tools, remedy = _FIELDS[field]
            if field not in self._ignored:
                copies, tools = copy.deepcopy((messages, tools))
                try:
                    text = self._processor.apply_chat_template(copies, tools=tools, tokenize=False)
                    self._ignored[field] = _MARKER not in text
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
        if self._empty == "train" or not self._prompts_end_in_newline:
            return False
        for message in messages:
            text, reasoning = "".join(texts_of(message["content"])), message.get("reasoning_content") or "."
            if not text[:1].strip() or not reasoning[:1].strip() or "</think>" in text:
                return False
        return True

    @cached_property
    def _prompts_end_in_newline(self) -> bool:
        """Whether generation prompts end in a newline, which a tokenizer joins only with white space after it."""
        asked = [{"role": "user", "content": "a"}]
        try:
            return self._processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True).endswith("\n")
        except Exception:  # what a template refuses, it also refuses in the sample
            return False

    def answers(self, conversation: Conversation, numbers: Sequence[int]) -> tuple[str, list[Span]]:
        """The whole text, and the spans in it of the messages of these numbers, each with its end token; a `DataError`
        if one cannot be located, or the template drops text of it.
        """
        text = self.render(conversation, conversation.messages)
        if self._thinks:
            return text, self._thinking_spans(conversation, text, numbers)
        return text, [self._span(conversation, text, number) for number in numbers]

    def _span(self, conversation: Conversation, text: str, number: int) -> Span:
        """The characters of an answer under a template without thinking."""
        messages, where = conversation.messages, f"{conversation.sample_id}: message {number + 1}"
        prompt = self.render(conversation, messages[:number], prompt=True)
        turn = self.render(conversation, messages[: number + 1])
        for first_name, first, second_name, second, remedy in (
            ("the prompt to generate it", prompt, "it", turn, _ITS_PROMPT),
            ("it by itself", turn, "it with what follows", text, _EARLIER),
        ):
            if second.startswith(first):
                continue
            pairs = enumerate(zip(first, second, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
            raise DataError(
                where,
                f"the chat template renders {first_name} as '...{first[max(at - 20, 0) : at + 20]}', but {second_name} "
                f"as '...{second[max(at - 20, 0) : at + 20]}': expected the second to begin with the first; {remedy}",
            )
        # Templates render white space between turns, which the model does not have to generate.
        end = len(turn.rstrip())
        if not turn[len(prompt) : end].endswith(self._closing):
            raise DataError(where, f"the answer ends in {turn[-20:]!r}, expected a token that closes the turn")
        _check_answer(messages[number], prompt, text[len(prompt) : end], where, _ANOTHER)
        return len(prompt), end

    def _thinking_spans(self, conversation: Conversation, text: str, numbers: Sequence[int]) -> list[Span]:
        """The characters of answers under a template with thinking, each with its reasoning if that is written."""
        messages, prompts, spans = conversation.messages, self._prompts(conversation), []
        # Words that the text does not contain.
        answer, reasoning = (
            next(word for n in itertools.count() if (word := f"{name}-{n}-marked") not in text)
            for name in ("answer", "reasoning")
        )
        for number in numbers:
            where = f"{conversation.sample_id}: message {number + 1}"

            def refused(part: str, expected: str, where: str = where) -> DataError:
                return DataError(
                    where,
                    f"the chat template renders {part} as {expected!r}, and not so in the whole conversation; expected "
                    "a template whose text around an answer does not depend on it: give the checkpoint's own, or train "
                    "on only the last answer with answers='last'",
                )

            # The whole conversation with a marker for the answer, and with another for its reasoning.
            is_text = isinstance(messages[number]["content"], str)
            other = {"role": "assistant", "content": answer if is_text else [{"type": "text", "text": answer}]}
            alone, marked = (
                self.render(conversation, [*messages[:number], other | fields, *messages[number + 1 :]])
                for fields in ({}, {"reasoning_content": reasoning})
            )
            if (count := alone.count(answer)) != 1:
                problem = f"the chat template writes the answer {count} times, expected once"
                remedy = "leave it out with answers='last' or \"loss\": false, or give another template"
                raise DataError(where, f"{problem}; {remedy}")
            head, tail = alone.split(answer)
            if not text.endswith(tail):
                raise refused("what follows the answer", tail[:40])
            closed = next((token for token in self._closing if tail.lstrip().startswith(token)), None)
            if closed is None:
                raise DataError(
                    where, f"the answer is followed by {tail[:20]!r}, expected a token that closes the turn"
                )
            end = len(text) - len(tail)
            # The text before the reasoning; None if the template omits reasoning here.
            opened = marked.partition(reasoning)[0] if reasoning in marked else None
            empty = opened is not None and head.startswith(opened) and text.startswith(head)
            thinks = opened is not None and text.startswith(opened) and (not empty or self._empty == "train")
            before = opened if opened is not None and thinks else head
            # The generation prompt ends where the turn begins to differ, or before a thinking block.
            prompt, header = prompts[thinks], _BLOCK.sub("", before)
            if not text.startswith(before):
                raise refused("what precedes the answer", head[-40:])
            if not header.endswith(_BLOCK.sub("", prompt)):
                raise refused(f"the prompt to generate it, with enable_thinking {thinks},", prompt)
            start = len(head)
            if thinks:
                start = len(before) if before.endswith(prompt) else len(header)
            if start > end:
                raise refused("what precedes the answer", head[-40:])
            spans.append((start, end + tail.index(closed) + len(closed)))
            said = text[slice(*spans[-1])]
            _check_answer(messages[number], text[:start], said, where, _REASONING, drops_reasoning=opened is None)
        return spans

    def _prompts(self, conversation: Conversation) -> dict[bool, str]:
        """The prompts to generate the last answer, with and without thinking, from where the messages end."""
        last = max(number for number, message in enumerate(conversation.messages) if message["role"] == "assistant")
        asked, prompts = conversation.messages[:last], {}
        written = self.render(conversation, asked)
        for thinking in (True, False):
            prompt = self.render(conversation, asked, prompt=True, enable_thinking=thinking)
            if not prompt.startswith(written) or prompt == written:
                raise DataError(
                    f"{conversation.sample_id}: message {last + 1}",
                    f"the chat template ends the prompt to generate it with {prompt[-40:]!r}, expected the messages as "
                    f"without it, {written[-40:]!r}, and then the beginning of an answer: give the checkpoint another "
                    "template, which heeds add_generation_prompt",
                )
            prompts[thinking] = prompt.removeprefix(written)
        return prompts


def _check_answer(
    message: dict[str, Any], prompt: str, answer: str, where: str, remedy: str, drops_reasoning: bool = False
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
