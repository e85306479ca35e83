"""Conversations as prompts: everything before the last answer, with that answer as the reference.

Reasoning is not part of an answer: neither the conversation's, next to the answer or inside its content, nor the
model's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from qwen3vl_bridge.data.chat_template import texts_of
from qwen3vl_bridge.data.dataset_provider import ConversationRows
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.sources.opening import ConversationSource

from torch import Tensor

_OPEN, _CLOSE = re.compile(r"<think>\s*\Z"), "</think>"
_TAIL = 8  # tokens; a prompt that opens a thinking block has it in its last two


@dataclass(frozen=True)
class Question:
    """A prompt and its expected answer."""

    prompt: EncodedSample  # images, videos and the [n] tokens up to the answer
    answer: str  # without reasoning
    sample_id: str
    thinks: bool = False  # whether the prompt opens a thinking block that the model must close before its answer

    def answer_in(self, said: str) -> str:
        """The answer in a model's output, without its reasoning; empty if the reasoning is not finished."""
        return "" if self.thinks and _CLOSE not in said else said.rpartition(_CLOSE)[2]

    @property
    def pictures(self) -> dict[str, Tensor]:
        """Pixels and grids, as arguments of a model."""
        names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        found = ((name, getattr(self.prompt, name)) for name in names)
        return {name: value for name, value in found if value is not None}


def questions(source: ConversationSource, rows: ConversationRows, first: int) -> list[Question]:
    """The prompts of the `first` conversations of a source, encoded as for training; a `DataError` for one that cannot
    be, or does not end with an assistant's text.
    """
    encoder = replace(rows, answers="last").checkpoint().encoder
    decode = encoder.processor.tokenizer.decode
    found = []
    for number in range(min(first, len(source))):
        conversation = replace(source[number], losses={})  # it does not matter here which messages a run trains on
        last = conversation.messages[-1]
        if last["role"] != "assistant":
            raise DataError(conversation.sample_id, f"the last message is the {last['role']}'s, expected an answer")
        sample = encoder(conversation)
        # A label counts if the token after it belongs to the answer.
        length = int(sample.loss_mask.argmax()) + 1
        prompt = replace(sample, input_ids=sample.input_ids[:length])
        thinks = _OPEN.search(decode(prompt.input_ids[-_TAIL:])) is not None
        answer = "".join(texts_of(last["content"])).rpartition(_CLOSE)[2]
        found.append(Question(prompt, answer, conversation.sample_id, thinks))
    return found
