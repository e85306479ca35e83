"""Positions of answers under a chat template with thinking.

What lives here: the span of an assistant's turn in the rendering of the whole conversation. What may not: the loss mask
of other templates, tokens (`encoding.py`, `tokenization.py`).

These templates render reasoning only after the last question, so a prefix of a conversation renders differently by
itself. A turn is located by rendering the whole conversation with a marker in place of the answer, and another in place
of its reasoning. Whether the prompt asks for thinking follows from the sample: it does if the sample has reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.processing.tokenization import Span
from qwen3vl_bridge.data.processing.unwritten import BLOCK, check_answer

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
