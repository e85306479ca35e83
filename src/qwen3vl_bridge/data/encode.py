"""A conversation as tokens, labels and pixels, by the checkpoint's own processor and chat template.

What lives here: rendering, tokenising, and the loss mask. What may not: reading files (`conversations.py`), rows and
batches (`packing.py`, `collate.py`).

Which tokens are trained on is asked of the template, not of the tokens: what the template renders for the messages
before an answer, with the prompt to generate, is what a model will be given; the rest of the turn, up to the token
that closes it, is the answer. A user's text may hold anything, the template's own control tokens too, and none of it
is ever trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import torch
from torch import Tensor

from .conversations import Conversation
from .errors import DataError
from .media import image_size, load_image


@dataclass(frozen=True)
class EncodedSample:
    """One sample ready to be laid in a row. L tokens, N patches.

    Attributes:
        input_ids: [L] int64.
        labels: [L] int64, the next token; the last one is its own, and never trained on.
        loss_mask: [L] float32, 1 where the label is trained on.
        pixel_values: [N, channels * temporal_patch * patch * patch] float32, or None without pictures.
        image_grid_thw: [images, 3] int64, or None without pictures.
        sample_id: file and line.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    sample_id: str

    def __len__(self) -> int:
        return len(self.input_ids)


class Encoder:
    """Turns conversations into `EncodedSample`s. Picklable, so that data-loading workers can have one each."""

    def __init__(self, processor: Any) -> None:
        """Keep a processor, as `load_processor` gives it."""
        self.processor = processor
        # Pictures are not answers, even where a template lets an assistant's turn show one.
        pictorial = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        self._never = torch.tensor([number for name in pictorial if (number := getattr(processor, name)) is not None])

    def length(self, conversation: Conversation) -> int:
        """How many tokens the sample takes, without its pictures' pixels.

        Raises:
            DataError: a picture or a conversation that cannot be encoded.
        """
        text = self._render(conversation, conversation.messages)
        sizes = [image_size(path, conversation.sample_id) for path in conversation.images]
        self._check_placeholders(conversation, text)
        images = self.processor.image_processor
        try:
            patches = [images.get_number_of_image_patches(height, width, {}) for height, width in sizes]
        except ValueError as error:
            raise _refused(conversation, error) from error
        extra = sum(number // images.merge_size**2 - 1 for number in patches)
        return len(self.processor.tokenizer(text)["input_ids"]) + extra

    def __call__(self, conversation: Conversation) -> EncodedSample:
        """Encode one conversation.

        Raises:
            DataError: pictures that do not decode or don't match their places in the text, or a template that gives
                no place to hold on to for an answer.
        """
        text, answers = self._answers(conversation)
        self._check_placeholders(conversation, text)
        pictures = [load_image(path, conversation.sample_id) for path in conversation.images]
        try:
            encoded = self.processor(
                text=[text],
                images=pictures or None,
                return_offsets_mapping=True,
                return_mm_token_type_ids=False,
                return_tensors="pt",
            )
        except (ValueError, RuntimeError) as error:
            raise _refused(conversation, error) from error
        ids, offsets = encoded["input_ids"][0], encoded["offset_mapping"][0]
        grids = encoded.get("image_grid_thw")
        trained = torch.zeros(len(ids), dtype=torch.bool)
        for start, end in self._expanded(text, answers, grids):
            trained |= (offsets[:, 0] >= start) & (offsets[:, 0] < end)
        trained &= ~torch.isin(ids, self._never)
        return EncodedSample(
            input_ids=ids,
            labels=torch.cat((ids[1:], ids[-1:])),
            loss_mask=torch.cat((trained[1:], trained.new_zeros(1))).float(),
            pixel_values=encoded.get("pixel_values"),
            image_grid_thw=grids,
            sample_id=conversation.sample_id,
        )

    def _answers(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The whole text, and where in it the answers lie, each with the token that closes it."""
        messages, place = conversation.messages, conversation.sample_id
        text = self._render(conversation, messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            where = f"{place}: message {number + 1}"
            prompt = self._render(conversation, messages[:number], prompt=True)
            turn = self._render(conversation, messages[: number + 1])
            if not turn.startswith(prompt):
                raise DataError(where, _parting("the prompt to generate it", prompt, "it", turn))
            if not text.startswith(turn):
                raise DataError(where, _parting("it alone", turn, "it with what follows", text))
            # Templates put white space between turns, which a model is not asked for.
            end = len(turn.rstrip())
            if not turn[len(prompt) : end].endswith(tuple(self.processor.tokenizer.all_special_tokens)):
                raise DataError(where, f"the answer ends in {turn[-20:]!r}, expected a token that closes the turn")
            spans.append((len(prompt), end))
        return text, spans

    def _render(self, conversation: Conversation, messages: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        copies = [dict(message) for message in messages]  # transformers rewrites messages in place
        try:
            return self.processor.apply_chat_template(copies, tokenize=False, add_generation_prompt=prompt)
        except jinja2.TemplateError as error:
            raise DataError(conversation.sample_id, f"the chat template refuses it: {error}") from error

    def _check_placeholders(self, conversation: Conversation, text: str) -> None:
        """Refuses text that would be taken for a picture."""
        for number, message in enumerate(conversation.messages, start=1):
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            for token in (self.processor.image_token, self.processor.video_token):
                if any(token in words for words in texts):
                    place = f"{conversation.sample_id}: message {number}"
                    raise DataError(place, f"found {token!r} in the text, which stands for a picture")
        found, expected = text.count(self.processor.image_token), len(conversation.images)
        if found != expected:
            raise DataError(
                conversation.sample_id, f"the chat template made {found} places for pictures, expected {expected}"
            )

    def _expanded(self, text: str, spans: list[tuple[int, int]], grids: Tensor | None) -> list[tuple[int, int]]:
        """The spans in the text that was tokenised, where each picture's token stands once for each of its tokens."""
        if grids is None:
            return spans
        token, merge = self.processor.image_token, self.processor.image_processor.merge_size
        added = [(number - 1) * len(token) for number in (grids.prod(-1) // merge**2).tolist()]
        shift, place, shifts = 0, -1, []
        for extra in added:
            place = text.index(token, place + 1)
            shift += extra
            shifts.append((place, shift))

        def moved(offset: int) -> int:
            return offset + max((shift for place, shift in shifts if place < offset), default=0)

        return [(moved(start), moved(end)) for start, end in spans]


def _refused(conversation: Conversation, error: Exception) -> DataError:
    return DataError(conversation.sample_id, f"the processor refuses it: {error}")


def _parting(first_name: str, first: str, second_name: str, second: str) -> str:
    """Where two texts part that should begin alike."""
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return (
        f"the chat template renders {first_name} as '...{first[max(at - 20, 0) : at + 20]}', but {second_name} as "
        f"'...{second[max(at - 20, 0) : at + 20]}': expected the second to begin with the first"
    )
