"""Read conversations as prompts. A prompt is everything before the last answer, and this answer is the reference.

Reasoning is not part of an answer, neither in the conversation (next to the answer or inside its content) nor in the
output of a model. `Prompts` reads the texts of all questions first, and images only when a prompt is encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from qwen3vl_bridge.data.chat_template import texts_of
from qwen3vl_bridge.data.conversations import Conversation
from qwen3vl_bridge.data.encoding import EncodedSample, Encoder
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.records import REFERENCES, short_repr
from qwen3vl_bridge.data.sources import ConversationSource

from torch import Tensor

_OPEN, _CLOSE = re.compile(r"<think>\s*\Z"), "</think>"
_TAIL = 8  # tokens; a prompt that opens a thinking block has it in its last two


@dataclass(frozen=True)
class Question:
    """The text of a question, and the answers that are accepted from the model."""

    index: int  # of the conversation
    sample_id: str
    text: str  # the last message before the answer
    references: tuple[str, ...]  # accepted answers, without reasoning
    tokens: int  # of the prompt and the conversation's answer


@dataclass(frozen=True)
class Prompt:
    """An encoded prompt, and whether it opens a thinking block."""

    sample: EncodedSample  # images, videos and the [n] tokens up to the answer
    thinks: bool  # whether it opens a thinking block that the model must close before its answer

    def extract_answer(self, said: str) -> str:
        """Return the answer in the output of a model, without reasoning; empty if the reasoning is not finished."""
        return "" if self.thinks and _CLOSE not in said else said.rpartition(_CLOSE)[2]

    @property
    def vision_inputs(self) -> dict[str, Tensor]:
        """Return the pixels and grids of the prompt, as keyword arguments of a Hugging Face model."""
        names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        found = ((name, getattr(self.sample, name)) for name in names)
        return {name: value for name, value in found if value is not None}


class Prompts:
    """The questions of a data set, read when the object is created, and their prompts, encoded on request.

    Args:
        source: the conversations.
        encoder: an encoder that trains on the last answer.
        numbers: indices of the conversations to read.

    Raises:
        DataError: a conversation does not end with an assistant message, or cannot be encoded. The contents of its
            images and videos are not read.
    """

    def __init__(self, source: ConversationSource, encoder: Encoder, numbers: Iterable[int]) -> None:
        self.source, self.encoder = source, encoder
        self.questions = [self._question(number) for number in numbers]

    def _read(self, index: int) -> Conversation:
        return replace(self.source[index], losses={})  # which messages a run trains on does not matter here

    def _question(self, index: int) -> Question:
        """Return the question of a conversation: the text of the message before the last answer, and accepted answers.

        The accepted answers are the `references` of its record, or else the last answer.
        """
        conversation = self._read(index)
        place, last = conversation.sample_id, conversation.messages[-1]
        if last["role"] != "assistant":
            raise DataError(place, f"the last message has the role {last['role']!r}, expected 'assistant'")
        accepted = conversation.references or ["".join(texts_of(last["content"])).rpartition(_CLOSE)[2]]
        if not isinstance(accepted, list | tuple) or not all(isinstance(answer, str) for answer in accepted):
            raise DataError(place, f"found {short_repr(accepted)} under {REFERENCES!r}, expected a list of texts")
        text = "".join(texts_of(conversation.messages[-2]["content"]))
        return Question(index, place, text, tuple(accepted), self.encoder.size(conversation).tokens)

    def encode(self, question: Question) -> Prompt:
        """Return the encoded prompt of a question, without its answer. Read its images and videos.

        Raise DataError if they cannot be read or encoded.
        """
        sample = self.encoder(self._read(question.index))
        # A label is trained on if the next token belongs to the answer.
        length = int(sample.loss_mask.argmax()) + 1
        prompt = replace(sample, input_ids=sample.input_ids[:length])
        tail = self.encoder.processor.tokenizer.decode(prompt.input_ids[-_TAIL:])
        return Prompt(prompt, _OPEN.search(tail) is not None)
