"""Conversations as questions: all up to the last answer as a prompt, and that answer to compare with.

What lives here: cutting a conversation there. What may not: generating and judging answers
(`training/monitoring/accuracy.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.processing.encoding import EncodedSample
from qwen3vl_bridge.data.row_settings import ConversationRows
from qwen3vl_bridge.data.sources.opening import ConversationSource

from torch import Tensor


@dataclass(frozen=True)
class Question:
    """A prompt and its expected answer.

    Attributes:
        prompt: pictures and the [n] tokens up to the answer.
        answer: text.
        sample_id: which conversation it is.
    """

    prompt: EncodedSample
    answer: str
    sample_id: str

    @property
    def pictures(self) -> dict[str, Tensor]:
        """Pixels and grids, as a model takes them."""
        names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        found = ((name, getattr(self.prompt, name)) for name in names)
        return {name: value for name, value in found if value is not None}


def questions(source: ConversationSource, rows: ConversationRows, first: int) -> list[Question]:
    """The first questions of a source.

    Args:
        source: conversations.
        rows: settings that say how they are encoded.
        first: how many.

    Raises:
        DataError: a conversation that cannot be encoded, or does not end with an assistant's text.
    """
    encoder = replace(rows, answers="last").checkpoint().encoder
    found = []
    for number in range(min(first, len(source))):
        conversation = replace(source[number], losses={})  # which of them a run trains on is no matter here
        last = conversation.messages[-1]
        if last["role"] != "assistant":
            raise DataError(conversation.sample_id, f"the last message is the {last['role']}'s, expected an answer")
        sample = encoder(conversation)
        # A label counts where the token after it is the answer's.
        length = int(sample.loss_mask.argmax()) + 1
        prompt = replace(sample, input_ids=sample.input_ids[:length])
        found.append(Question(prompt, _text(last["content"]), conversation.sample_id))
    return found


def _text(content: str | list[dict]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")
