"""Render conversations with a checkpoint's chat template, locate the answers, and raise for text that would be lost.

Answers are located by rendering, not by searching or by knowledge of released templates. A conversation is rendered
once more with markers in place of an answer and its reasoning; the text around the markers is the text around the
answer. (A prefix of a conversation may render differently by itself: some templates write reasoning only after the last
user message.) The text before an answer must end with the prompt that `add_generation_prompt` appends.

If an answer that is trained on has reasoning, a conversation is rendered with `enable_thinking`. Some templates then
write a different system prompt.

A template silently ignores fields: reasoning, tools, a system prompt after the first message. It may also silently drop
text, for example when it splits an answer at its think tags. This module raises DataError for both.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from qwen3vl_bridge.data.conversations import Conversation
from qwen3vl_bridge.data.errors import DataError

from jinja2 import Environment, TemplateError, meta

EmptyThinking = Literal["prompt", "train"]
Span = tuple[int, int]

# Advice for templates in which answers cannot be located: for the full conversation, for an answer that is followed by
# others, and for thinking within an answer.
_TEMPLATE_ADVICE = "give the checkpoint another chat template, which reads 'reasoning_content' if it writes thinking"
_SAMPLE_ADVICE = f"fix the sample, set dataset.on_bad=drop, or {_TEMPLATE_ADVICE}"
_EARLIER_ANSWER_ADVICE = (
    f"train on only the last answer with answers='last', leave this one out with \"loss\": false, or {_TEMPLATE_ADVICE}"
)
_REASONING_ADVICE = (
    "put reasoning under 'reasoning_content' and only the answer into the text; with an empty 'reasoning_content' the "
    "text is trained on as it is, with its think tags"
)
_BLOCK = re.compile(r"<think>\s*(</think>\s*)?\Z")  # at the end of a prompt, open or empty
_EMPTY_BLOCK = re.compile(r"\A\s*<think>\s*</think>")
_MEDIUM = "\0"  # stands for an image or a video, or for an empty text

# Names in a template that are not variables of a record, and the tag of transformers around answers.
_TRANSFORMERS_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_MOST_PROMPTS = 64

_MARKER = "unwritten0marker"  # text that no template filter changes
_ASK, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def _example_tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"c": {"type": "string", "description": "d"}}, "required": ["c"]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def _example_call(name: str) -> dict[str, Any]:
    called = {"type": "function", "id": "0", "function": {"name": name, "arguments": {"c": "d"}}}
    return {"role": "assistant", "content": "", "tool_calls": [called]}


_SYSTEM = {"role": "system", "content": _MARKER}
_TEMPLATE_WRITES_ADVICE = "give the checkpoint a chat template that writes it"
_REMOVE_ADVICE = f"take it out of the record, or {_TEMPLATE_WRITES_ADVICE}"
# Fields that a template may ignore, by the name in error messages: a conversation with the field, its tools, and
# advice if the field is ignored.
_FIELDS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]] = {
    "tools": (
        [_ASK, _ANSWER],
        [_example_tool(_MARKER)],
        f"leave them out (columns.ignore=[tools]), or {_TEMPLATE_WRITES_ADVICE}",
    ),
    "a system prompt": ([_SYSTEM, _ASK, _ANSWER], None, _REMOVE_ADVICE),
    "a system prompt after the first message": (
        [_ASK, _ANSWER, _SYSTEM, _ASK, _ANSWER],
        None,
        f"join it to the first message's or to the question after it, or {_TEMPLATE_WRITES_ADVICE}",
    ),
    "reasoning_content": ([_ASK, {**_ANSWER, "reasoning_content": _MARKER}], None, _REMOVE_ADVICE),
    "tool_calls": ([_ASK, _example_call(_MARKER)], [_example_tool("e")], _REMOVE_ADVICE),
    "a tool's answer": (
        [_ASK, _example_call("e"), {"role": "tool", "content": _MARKER, "name": "e", "tool_call_id": "0"}, _ANSWER],
        [_example_tool("e")],
        _REMOVE_ADVICE,
    ),
}


def texts_of(content: str | list[dict[str, Any]]) -> list[str]:
    """Return the texts of a message's content: the string itself, or the text of each part ("" for image or video)."""
    return [content] if isinstance(content, str) else [part.get("text", "") for part in content]


class ChatTemplate:
    """The chat template of a processor. Picklable, for data-loading workers."""

    def __init__(self, processor: Any, empty_thinking: EmptyThinking = "prompt", **settings: Any) -> None:
        """Read the chat template of a processor; raise ValueError if the template ignores or rejects a setting.

        Args:
            empty_thinking: whether the empty thinking block before an answer without reasoning belongs to the "prompt"
                or is trained on ("train").
            settings: values of template variables by name; None keeps the template's default.
        """
        self._processor = processor
        self._empty: EmptyThinking = empty_thinking
        self._reads_reasoning = "reasoning_content" in str(processor.chat_template)
        self._special = tuple(processor.tokenizer.all_special_tokens)
        self._ignored: dict[str, bool] = {}  # by field
        self._prompts: dict[str, str] = {}  # by the template's variables
        self._variables = _variables_in_template(str(processor.chat_template))
        self.settings = {name: value for name, value in settings.items() if value is not None}
        if empty_thinking != "prompt" and not self._reads_reasoning:
            raise ValueError(
                f"empty_thinking is {empty_thinking!r}, but the chat template does not read 'reasoning_content'; "
                "expected 'prompt'"
            )
        for name, value in self.settings.items():
            if name not in self._variables:
                raise ValueError(f"{name} is {value!r}, but the chat template ignores it; expected None")
        if self.settings:
            try:
                self._apply([_ASK, _ANSWER], enable_thinking=True)
            except Exception as error:  # a template is a program, and may raise for a value
                given = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
                raise ValueError(f"the chat template fails with {given}: {error}") from error

    def _apply(self, messages: Sequence[dict[str, Any]], tools: Any = None, **variables: Any) -> str:
        """Return the text that the template renders for the messages."""
        # Copies, because transformers changes messages in place; it also warns about variables that a template
        # does not read.
        copies, tools = copy.deepcopy((list(messages), tools))
        given = self.settings | variables
        known = {name: value for name, value in given.items() if name in {*self._variables, "add_generation_prompt"}}
        return self._processor.apply_chat_template(copies, tools=tools, tokenize=False, **known)

    def _render(self, conversation: Conversation, messages: Sequence[dict[str, Any]], thinking: bool) -> str:
        try:
            return self._apply(messages, conversation.tools, **_template_variables(conversation, thinking))
        except Exception as error:  # a template is a program, and runs on arbitrary records
            raise DataError(conversation.sample_id, f"the chat template fails: {error}; {_SAMPLE_ADVICE}") from error

    def check_fields(self, conversation: Conversation) -> None:
        """Raise DataError if the template ignores a field or a `chat_template_kwargs` entry of a conversation."""
        if unread := [name for name in conversation.template_kwargs if name not in self._variables]:
            raise DataError(
                conversation.sample_id,
                f"found {unread[0]!r} under 'chat_template_kwargs', but the chat template reads only "
                f"{', '.join(sorted(self._variables)) or 'no variables'}; remove it from the record, or ignore all of "
                "its variables (columns.ignore=[chat_template_kwargs])",
            )
        for field, where in _optional_fields(conversation):
            messages, tools, remedy = _FIELDS[field]
            if field not in self._ignored:
                try:
                    self._ignored[field] = _MARKER not in self._apply(messages, tools)
                except Exception:  # the sample raises the same error
                    self._ignored[field] = False
            if self._ignored[field]:
                raise DataError(
                    where,
                    f"found {field}, which the chat template ignores: the sample would be trained on without it; "
                    f"{remedy}",
                )

    def is_plain(self, conversation: Conversation, numbers: Sequence[int]) -> bool:
        """Return True if tokenizing the rendered text at once gives the same tokens as tokenizing answers separately.

        `numbers` are the message indices of the answers. Return False if this is not certain, for example if an answer
        begins with white space or contains "</think>".
        """
        # A tokenizer joins the newline at the end of a prompt only with white space after it.
        if self._trains_empty_thinking(conversation) or not self._prompt(conversation, True).endswith("\n"):
            return False
        for message in (conversation.messages[number] for number in numbers):
            text, reasoning = "".join(texts_of(message["content"])), message.get("reasoning_content") or "."
            if not text[:1].strip() or not reasoning[:1].strip() or "</think>" in text:
                return False
        return True

    @cached_property
    def _splits_reasoning(self) -> bool:
        """Return whether the template splits the text of an answer at "</think>" instead of writing it unchanged."""
        inside = f"{_MARKER}</think>b"
        try:
            return inside not in self._apply([_ASK, {"role": "assistant", "content": inside}])
        except Exception:  # the sample raises the same error
            return False

    def _prompt(self, conversation: Conversation, thinking: bool) -> str:
        """Return the text that `add_generation_prompt` appends to a user message, with `enable_thinking=thinking`.

        Return "" if the template fails for this message, or also changes the text of the message.
        """
        given = _template_variables(conversation, thinking)
        if (key := repr(given)) not in self._prompts:
            if len(self._prompts) >= _MOST_PROMPTS:  # each record may have its own variables
                self._prompts.clear()
            try:
                asked, prompt = (self._apply([_ASK], add_generation_prompt=asks, **given) for asks in (False, True))
                self._prompts[key] = prompt.removeprefix(asked) if prompt.startswith(asked) else ""
            except Exception:  # the sample raises the same error
                self._prompts[key] = ""
        return self._prompts[key]

    def _has_reasoning(self, message: dict[str, Any]) -> bool:
        """Return whether a message has reasoning: in `reasoning_content`, or before a "</think>" in its text.

        Text before a "</think>" is reasoning only if the template splits answers there.
        """
        separate = message.get("reasoning_content")
        if isinstance(separate, str):
            return bool(separate.strip())
        inside, closed, _ = "".join(texts_of(message["content"])).partition("</think>")
        return bool(closed and inside.rpartition("<think>")[2].strip()) and self._splits_reasoning

    def _trains_empty_thinking(self, conversation: Conversation) -> bool:
        """Return whether empty thinking blocks of a conversation are trained on.

        If so, the conversation is rendered with `enable_thinking`.
        """
        return bool(conversation.template_kwargs.get("enable_thinking", self._empty == "train"))

    def _asks_for_thinking(self, conversation: Conversation, numbers: Sequence[int]) -> bool:
        reasons = any(self._has_reasoning(conversation.messages[number]) for number in numbers)
        if reasons and not conversation.template_kwargs.get("enable_thinking", True):
            raise DataError(
                conversation.sample_id,
                "found enable_thinking false under 'chat_template_kwargs', but an answer that is trained on has "
                "reasoning; remove one of them",
            )
        return reasons or self._trains_empty_thinking(conversation)

    def render(self, conversation: Conversation, numbers: Sequence[int]) -> str:
        """Return the rendered text of a conversation. `numbers` are the indices of the messages that are trained on.

        Raises:
            DataError: the template fails, or the conversation turns off thinking but trains on reasoning.
        """
        return self._render(conversation, conversation.messages, self._asks_for_thinking(conversation, numbers))

    def render_with_answers(self, conversation: Conversation, numbers: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the rendered text of a conversation, and the character span of each answer in it.

        `numbers` are the message indices of the answers. A span includes the reasoning and the end token of an answer.

        Raises:
            DataError: an answer cannot be located, or the template drops a part of it.
        """
        text, thinking = self.render(conversation, numbers), self._asks_for_thinking(conversation, numbers)
        return text, [self._span(conversation, text, number, thinking) for number in numbers]

    def _span(self, conversation: Conversation, text: str, number: int, thinking: bool) -> Span:
        """Return the character span, in the rendered text, of the answer in the message with index `number`.

        Raises:
            DataError: the answer cannot be located, or the template drops a part of it.
        """
        message, where = conversation.messages[number], f"{conversation.sample_id}: message {number + 1}"
        is_last = number + 1 == len(conversation.messages)

        def make_error(part: str, expected: str) -> DataError:
            return DataError(
                where,
                f"the chat template renders {part} as {expected!r}, but differently in the full conversation; "
                "expected text around an answer that does not depend on the answer: "
                f"{_TEMPLATE_ADVICE if is_last else _EARLIER_ANSWER_ADVICE}",
            )

        before, is_written, after = self._find_surroundings(conversation, text, number, thinking, where)
        if not text.startswith(before) or len(before) + len(after) > len(text):
            raise make_error("the text before the answer", before[-40:])
        if not text.endswith(after):
            raise make_error("the text after the answer", after[:40])
        if not (prompt := self._prompt(conversation, thinking)):
            raise DataError(
                where,
                "add_generation_prompt does not append a prompt to a user message alone; give the checkpoint another "
                "chat template that does",
            )
        special = [token for token in self._special if after.lstrip().startswith(token)]
        if not special or prompt.lstrip().startswith(special[0]):  # that begins the next turn
            raise DataError(
                where,
                f"the chat template writes {after[:20]!r} after the answer, expected a special token that ends the "
                "turn, such as <|im_end|>; give the checkpoint another chat template",
            )
        end = len(text) - len(after) + after.index(special[0]) + len(special[0])
        # The text before the answer and the prompt may end with a thinking block, open or empty.
        header, asks = (_BLOCK.sub("", words) for words in (before, prompt))
        block = prompt.removeprefix(asks)
        # Templates that write reasoning write no block before earlier answers.
        needs_block = block and (is_last or not (self._reads_reasoning or self._splits_reasoning))
        if not header.endswith(asks) or (needs_block and header == before):
            raise make_error(f"the prompt to generate it, with enable_thinking {thinking},", prompt)
        start = len(before)
        if is_written or self._trains_empty_thinking(conversation):
            start = len(header) + (len(block) if before.startswith(block, len(header)) else 0)
        remedy = _REASONING_ADVICE if self._reads_reasoning else _TEMPLATE_ADVICE
        is_dropped = self._has_reasoning(message) and not is_written and not is_last
        _check_answer_is_complete(message, text[:start], text[start:end], where, remedy, is_dropped)
        return start, end

    def _find_surroundings(
        self, conversation: Conversation, text: str, number: int, thinking: bool, where: str
    ) -> tuple[str, bool, str]:
        """Return (rendered text before an answer, whether its reasoning is rendered, rendered text after the answer).

        If the reasoning is rendered, the first text ends where the reasoning begins.
        """
        # Markers that the text does not contain.
        answer, reasoning = (
            next(word for n in itertools.count() if (word := f"{name}-{n}-marked") not in text)
            for name in ("answer", "reasoning")
        )
        messages, content, separate = conversation.messages, answer, {}
        if self._has_reasoning(messages[number]):
            if isinstance(messages[number].get("reasoning_content"), str):
                separate = {"reasoning_content": reasoning}
            else:
                content = f"<think>\n{reasoning}\n</think>\n\n{answer}"
        parts = content if isinstance(messages[number]["content"], str) else [{"type": "text", "text": content}]
        other = {"role": "assistant", "content": parts, **separate}
        marked = self._render(conversation, [*messages[:number], other, *messages[number + 1 :]], thinking)
        if (count := marked.count(answer)) != 1:
            problem = f"the chat template writes the answer {count} times, expected once"
            remedy = "exclude it with answers='last' or \"loss\": false, or use another template"
            raise DataError(where, f"{problem}; {remedy}")
        head, after = marked.split(answer)
        before, is_written, _ = head.partition(reasoning)
        return before, bool(is_written), after


def _check_answer_is_complete(
    message: dict[str, Any], prompt: str, answer: str, where: str, remedy: str, drops_reasoning: bool
) -> None:
    """Raise DataError if the rendered `answer` lacks text or reasoning of its assistant message.

    `prompt` is the rendered text before `answer`. With `drops_reasoning`, missing reasoning is accepted: templates omit
    it before the last user message. The error message begins with `where` and ends with `remedy`.
    """
    texts, reasoning = texts_of(message["content"]), message.get("reasoning_content")
    before, _, rest = "".join(text or _MEDIUM for text in texts).partition("<think>")
    inside, closed, behind = rest.partition("</think>")
    # If reasoning is given separately, tags in the text are literal.
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
                f"found {text[:60]!r} in the answer, but the chat template writes only {answer[:60]!r}; {remedy}",
            )
        at = found + len(text)


def _template_variables(conversation: Conversation, thinking: bool) -> dict[str, Any]:
    """Return the chat template's variables for a conversation: its `chat_template_kwargs`, and `enable_thinking`."""
    return {**conversation.template_kwargs, "enable_thinking": thinking}


def _variables_in_template(template: str) -> frozenset[str]:
    """Return the names of the variables that a chat template reads, without those that transformers always provides.

    For a template with a syntax error, return an empty set.
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        names = meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except TemplateError:  # raised by transformers when the template is first used
        return frozenset()
    return frozenset(
        name for name in names - {*environment.globals, *_TRANSFORMERS_NAMES} if not name.endswith("_token")
    )


def _optional_fields(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield (field name, location for error messages) for each field of a conversation that a template may ignore."""
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
