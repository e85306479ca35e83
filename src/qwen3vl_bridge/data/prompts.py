"""Read conversations as prompts: everything before the last answer, with that answer as the reference.

Reasoning is not part of an answer, neither in the conversation (next to the answer or inside its content) nor in the
output of a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from qwen3vl_bridge.data.chat_template import texts_of
from qwen3vl_bridge.data.encoding import EncodedSample, Encoder
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.records import REFERENCES, short_repr
from qwen3vl_bridge.data.sources import ConversationSource

from torch import Tensor

_OPEN, _CLOSE = re.compile(r"<think>\s*\Z"), "</think>"
_TAIL = 8  # tokens; a prompt that opens a thinking block has it in its last two


@dataclass(frozen=True)
class Prompt:
    """An encoded prompt, and the answers that are accepted from the model."""

    prompt: EncodedSample  # images, videos and the [n] tokens up to the answer
    references: tuple[str, ...]  # accepted answers, without reasoning
    question: str  # the text of the last message before the answer
    sample_id: str
    thinks: bool = False  # whether the prompt opens a thinking block that the model must close before its answer

    def extract_answer(self, said: str) -> str:
        """Return the answer in the output of a model, without reasoning; empty if the reasoning is not finished."""
        return "" if self.thinks and _CLOSE not in said else said.rpartition(_CLOSE)[2]

    @property
    def vision_inputs(self) -> dict[str, Tensor]:
        """Return the pixels and grids of the prompt, as keyword arguments of a Hugging Face model."""
        names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        found = ((name, getattr(self.prompt, name)) for name in names)
        return {name: value for name, value in found if value is not None}


def read_prompts(source: ConversationSource, encoder: Encoder, numbers: Iterable[int]) -> list[Prompt]:
    """Return the prompts of the conversations of a source with these indices.

    The accepted answers are the `references` of a record, or the last answer of the conversation.

    Args:
        source: the conversations.
        encoder: an encoder that trains on the last answer.
        numbers: indices of conversations.

    Raises:
        DataError: a conversation cannot be encoded, or does not end with an assistant message.
    """
    decode = encoder.processor.tokenizer.decode
    found = []
    for number in numbers:
        conversation = replace(source[number], losses={})  # which messages a run trains on does not matter here
        last = conversation.messages[-1]
        if last["role"] != "assistant":
            raise DataError(
                conversation.sample_id, f"the last message has the role {last['role']!r}, expected 'assistant'"
            )
        sample = encoder(conversation)
        # A label is trained on if the next token belongs to the answer.
        length = int(sample.loss_mask.argmax()) + 1
        prompt = replace(sample, input_ids=sample.input_ids[:length])
        thinks = _OPEN.search(decode(prompt.input_ids[-_TAIL:])) is not None
        accepted = conversation.references or ["".join(texts_of(last["content"])).rpartition(_CLOSE)[2]]
        if not isinstance(accepted, list | tuple) or not all(isinstance(answer, str) for answer in accepted):
            problem = f"found {short_repr(accepted)} under {REFERENCES!r}, expected a list of texts"
            raise DataError(conversation.sample_id, problem)
        question = "".join(texts_of(conversation.messages[-2]["content"]))
        found.append(Prompt(prompt, tuple(accepted), question, conversation.sample_id, thinks))
    return found
