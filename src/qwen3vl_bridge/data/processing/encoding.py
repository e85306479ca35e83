"""Encodes a conversation as tokens, labels and pixels, with the checkpoint's own processor and chat template.

Trained tokens are determined by rendering, not by searching tokens: the messages before an answer are rendered with the
generation prompt, which is the model's input; the rest of the turn up to its end token is the answer. User text is
never trained on, even if it contains control tokens. Templates with thinking are handled differently (`thinking.py`).

A message's own setting decides whether it is trained on (`Conversation.losses`), and `answers` for messages without
one.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from operator import itemgetter
from typing import Any, Literal

from qwen3vl_bridge.data.errors import DataError, check_choice
from qwen3vl_bridge.data.media import videos as video
from qwen3vl_bridge.data.media.images import image_size, load_image
from qwen3vl_bridge.data.packing.sample_sizes import Size
from qwen3vl_bridge.data.processing.thinking import EmptyThinking, Turns
from qwen3vl_bridge.data.processing.tokenization import Seen, Tokens, tokenise
from qwen3vl_bridge.data.processing.unwritten import Unwritten, check_answer, texts_of
from qwen3vl_bridge.data.schemas.conversations import Conversation, PixelLimits

import torch
from torch import Tensor

Answers = Literal["all", "last"]

# What to do about a template in which answers cannot be located, by the text that fails: the whole conversation, the
# prompt of an answer, or an answer that is followed by others.
_ANOTHER = "give the checkpoint another chat template, which reads 'reasoning_content' if it writes thinking"
_WHOLE = f"mend the sample, leave it out with on_bad='drop', or {_ANOTHER}"
_ITS_PROMPT = f"{_ANOTHER}, as released ones do"
_EARLIER = f"train on only the last answer with answers='last', leave this one out with \"loss\": false, or {_ANOTHER}"


@dataclass(frozen=True)
class EncodedSample:
    """One encoded sample. L tokens, N patches.

    Attributes:
        input_ids: [L] int64.
        labels: [L] int64, the next token; the last label is the token itself, and never trained on.
        loss_mask: [L] float32, 1 where the label is trained on.
        pixel_values: [N, channels * temporal_patch * patch * patch] float32, or None without images.
        image_grid_thw: [images, 3] int64, or None without images.
        sample_id: file and line.
        pixel_values_videos: as `pixel_values`, of the videos.
        video_grid_thw: [videos, 3] int64, or None without videos.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    sample_id: str
    pixel_values_videos: Tensor | None = None
    video_grid_thw: Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def is_blank(self) -> bool:
        """Whether this replaces a sample that could not be read (`SampleFilter.blank`)."""
        return len(self) == 1  # no template renders a conversation as one token


class Encoder:
    """Encodes conversations as `EncodedSample`s. Picklable, so that data-loading workers can have one each."""

    def __init__(self, processor: Any, answers: Answers = "all", empty_thinking: EmptyThinking = "prompt") -> None:
        """Keep a processor from `load_processor`.

        Args:
            processor: the processor.
            answers: train on "all" answers of an assistant, or only on the "last", unless messages have their own
                setting.
            empty_thinking: whether the empty thinking block that the template renders before an answer without
                reasoning is part of the "prompt", or is trained on ("train").

        Raises:
            ValueError: an invalid value, or `empty_thinking` for a template without thinking.
        """
        check_choice("answers", answers, Answers)
        check_choice("empty_thinking", empty_thinking, EmptyThinking)
        self.processor, self._only = processor, answers
        self._empty: EmptyThinking = empty_thinking
        self._unwritten = Unwritten(processor)
        self._thinks = "reasoning_content" in str(processor.chat_template)
        if empty_thinking != "prompt" and not self._thinks:
            raise ValueError(
                f"empty_thinking is {empty_thinking!r}, but the chat template reads no 'reasoning_content' and writes "
                "no thinking; expected 'prompt'"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Whatever must be equal for a sample to have the same tokens.

        The template, the tokenizer, resolution limits, and what is trained on.
        """
        images, clips = self.processor.image_processor, self.processor.video_processor
        sizes = [reader.size[edge] for reader in (images, clips) for edge in ("shortest_edge", "longest_edge")]
        sizes += [getattr(images, name) for name in ("patch_size", "merge_size", "temporal_patch_size")]
        tokenizer = json.loads(self.processor.tokenizer.backend_tokenizer.to_str())
        for passing in ("padding", "truncation"):  # set by the last text that was encoded
            tokenizer.pop(passing, None)
        words = json.dumps([self.processor.chat_template, tokenizer], sort_keys=True)
        digest = hashlib.sha256(words.encode()).hexdigest()[:16]
        asked = () if self._empty == "prompt" else (self._empty,)
        return repr((*sizes, clips.fps, clips.min_frames, clips.max_frames, self._only, *asked, digest))

    def size(self, conversation: Conversation, limit: int | None = None) -> Size:
        """Space that the sample takes in a row; only headers of images are read.

        Args:
            conversation: the conversation.
            limit: maximum number of tokens, to which it is truncated; never within an image.

        Raises:
            DataError: an image or a conversation that cannot be encoded, or that has no answer to train on, or none
                before the limit.
        """
        seen = self._see(conversation)
        self._check_text(conversation)
        trained = self._trained(conversation)
        if self._is_plain(conversation, trained):  # then the positions of answers matter only to truncation
            text = self._render(conversation, conversation.messages)
            tokens = tokenise(self.processor, text, (), seen, conversation.sample_id)
        else:
            tokens = self._tokens(conversation, seen, None)
        if limit is not None and len(tokens) > limit:
            tokens = self._tokens(conversation, seen, limit)
        merge = self.processor.image_processor.merge_size**2
        frames = [(1, number * merge) for number in seen.image_tokens[: len(tokens.images)]]
        frames += [(clip.grid[0], prod(clip.grid[1:])) for clip in seen.videos[: len(tokens.videos)]]
        return Size(len(tokens), sum(t * n for t, n in frames), sum(t * n**2 for t, n in frames))

    def __call__(self, conversation: Conversation, limit: int | None = None) -> EncodedSample:
        """Encode one conversation; arguments as for `size`.

        Raises:
            DataError: images that do not decode or do not match their placeholders in the text, or a template in which
                an answer cannot be located.
        """
        seen = self._see(conversation)
        tokens = self._tokens(conversation, seen, limit)
        seen = Seen(seen.image_tokens[: len(tokens.images)], seen.videos[: len(tokens.videos)])
        images, videos = self._pixels(conversation, seen)
        ids, trained = tokens.whole()
        return EncodedSample(
            input_ids=ids,
            labels=torch.cat((ids[1:], ids[-1:])),
            loss_mask=torch.cat((trained[1:], trained.new_zeros(1))).float(),
            pixel_values=images.get("pixel_values"),
            image_grid_thw=images.get("image_grid_thw"),
            pixel_values_videos=videos.get("pixel_values_videos"),
            video_grid_thw=videos.get("video_grid_thw"),
            sample_id=conversation.sample_id,
        )

    def _tokens(self, conversation: Conversation, seen: Seen, limit: int | None) -> Tokens:
        self._check_text(conversation)
        text, answers = self._answers(conversation)
        tokens = tokenise(self.processor, text, answers, seen, conversation.sample_id)
        if limit is None or len(tokens) <= limit:
            return tokens
        cut = tokens.cut(limit)
        if not cut.trained[1:].any():
            problem = f"found {len(tokens)} tokens, and no answer among the first {len(cut)} that remain of it"
            raise DataError(conversation.sample_id, f"{problem}, expected one within {limit}")
        return cut

    def _see(self, conversation: Conversation) -> Seen:
        """Sizes of a conversation's images and videos, from their headers."""
        place, images = conversation.sample_id, self.processor.image_processor
        sizes = [image_size(image, place) for image in conversation.images]
        limits = [limit._asdict() for limit in self._limits(conversation)]
        try:
            patches = [
                images.get_number_of_image_patches(*size, limit) for size, limit in zip(sizes, limits, strict=True)
            ]
        except ValueError as error:
            raise _refused(conversation, error) from error
        videos = (video.sample(clip, self.processor.video_processor, place) for clip in conversation.videos)
        return Seen(tuple(number // images.merge_size**2 for number in patches), tuple(videos))

    def _pixels(self, conversation: Conversation, seen: Seen) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Results of the image and the video processor for a conversation's images and videos."""
        place, reader = conversation.sample_id, self.processor.video_processor
        pictures = [load_image(image, place) for image in conversation.images[: len(seen.image_tokens)]]
        pairs = zip(conversation.videos, seen.videos, strict=False)  # a truncated sample has fewer
        clips = [video.load(clip, sampled, reader, place) for clip, sampled in pairs]
        try:
            images = self._images(pictures, self._limits(conversation))
            # They are already sampled and resized.
            as_they_are = {"do_sample_frames": False, "do_resize": False, "return_tensors": "pt"}
            made = [reader(videos=[clip], **as_they_are) for clip in clips]
        except (ValueError, RuntimeError) as error:
            raise _refused(conversation, error) from error
        merge = self.processor.image_processor.merge_size**2
        found = [prod(grid) // merge for grid in images["image_grid_thw"].tolist()] if pictures else []
        found += [tuple(one["video_grid_thw"][0].tolist()) for one in made]
        expected = [*seen.image_tokens, *(sampled.grid for sampled in seen.videos)]
        if found != expected:
            raise DataError(place, f"images and videos became {found}, expected {expected} according to their headers")
        names = ("pixel_values_videos", "video_grid_thw") if made else ()
        return images, {name: torch.cat([one[name] for one in made]) for name in names}

    def _images(self, pictures: Sequence[Any], limits: Sequence[PixelLimits]) -> Mapping[str, Any]:
        """Results of the image processor, with one call for all images of the same limits; {} without any."""
        made = []
        pairs = zip(limits, pictures, strict=False)  # a truncated sample has fewer
        for limit, run in itertools.groupby(pairs, key=itemgetter(0)):
            images = [picture for _, picture in run]
            made.append(self.processor.image_processor(images=images, **limit._asdict(), return_tensors="pt"))
        if len(made) < 2:
            return made[0] if made else {}
        return {name: torch.cat([one[name] for one in made]) for name in made[0]}

    def _limits(self, conversation: Conversation) -> list[PixelLimits]:
        """Minimum and maximum pixels of each image: its own limits, or the processor's."""
        reader = self.processor.image_processor
        usual: tuple[int, int] = (reader.size["shortest_edge"], reader.size["longest_edge"])
        found, token = [], (reader.patch_size * reader.merge_size) ** 2
        for number in range(len(conversation.images)):
            own = conversation.limits.get(number, PixelLimits())
            least = usual[0] if own.min_pixels is None else own.min_pixels
            most = usual[1] if own.max_pixels is None else own.max_pixels
            where = f"{conversation.sample_id}: image {number + 1}"
            if own.max_pixels is not None and most < token:
                raise DataError(where, f"found 'max_pixels' {most}, expected at least {token}, the pixels of one token")
            if own != PixelLimits() and least > most:
                given, other = ("min", "max") if own.max_pixels is None else ("max", "min")
                raise DataError(
                    where,
                    f"found at least {least} and at most {most} pixels, where '{given}_pixels' is its own and "
                    f"'{other}_pixels' the processor's; expected both limits on the image, or one that "
                    "fits the processor's",
                )
            found.append(PixelLimits(least, most))
        return found

    def _answers(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The whole text, and the spans of its answers, each with its end token."""
        messages, place = conversation.messages, conversation.sample_id
        text = self._render(conversation, messages)
        spans = []
        answers = self._trained(conversation)
        closing = tuple(self.processor.tokenizer.all_special_tokens)
        if self._thinks:
            turns = Turns(place, messages, text, partial(self._render, conversation), closing, self._empty)
            return text, [turns.span(number) for number in answers]
        for number in answers:
            where = f"{place}: message {number + 1}"
            prompt = self._render(conversation, messages[:number], prompt=True)
            turn = self._render(conversation, messages[: number + 1])
            if not turn.startswith(prompt):
                raise DataError(where, _parting("the prompt to generate it", prompt, "it", turn, _ITS_PROMPT))
            if not text.startswith(turn):
                raise DataError(where, _parting("it by itself", turn, "it with what follows", text, _EARLIER))
            # Templates render white space between turns, which the model does not have to generate.
            end = len(turn.rstrip())
            if not turn[len(prompt) : end].endswith(closing):
                raise DataError(where, f"the answer ends in {turn[-20:]!r}, expected a token that closes the turn")
            check_answer(messages[number], prompt, text[len(prompt) : end], where, _ANOTHER)
            spans.append((len(prompt), end))
        return text, spans

    def _is_plain(self, conversation: Conversation, trained: Sequence[int]) -> bool:
        """Whether answers have the same tokens without regard to their positions, and no think tags that split them."""
        if self._empty == "train" or not self._prompts_end_in_newline:
            return False
        for message in (conversation.messages[number] for number in trained):
            text, reasoning = "".join(texts_of(message["content"])), message.get("reasoning_content") or "."
            if not text[:1].strip() or not reasoning[:1].strip() or "</think>" in text:
                return False
        return True

    @cached_property
    def _prompts_end_in_newline(self) -> bool:
        """Whether generation prompts end in a newline, which a tokenizer joins only with white space after it."""
        asked = [{"role": "user", "content": "a"}]
        try:
            return self.processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True).endswith("\n")
        except Exception:  # a template is a program; what it refuses, it also refuses in the sample
            return False

    def _trained(self, conversation: Conversation) -> list[int]:
        """Indices of the messages that are trained on, at least one."""
        answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        chosen = answers if self._only == "all" else answers[-1:]
        trained = [number for number in answers if conversation.losses.get(number, number in chosen)]
        if not trained:
            problem = f"found no answer to train on with answers={self._only!r}"
            raise DataError(
                conversation.sample_id, f"{problem}: the messages' own 'loss' or 'weight' exclude every answer"
            )
        return trained

    def _render(
        self, conversation: Conversation, messages: Sequence[dict[str, Any]], prompt: bool = False, **reads: Any
    ) -> str:
        """Render messages with the template; `reads` are its further variables, such as `enable_thinking`."""
        try:
            # transformers changes messages in place.
            copies, tools = copy.deepcopy((list(messages), conversation.tools))
            # transformers warns each time about variables that a template does not read; Qwen3-VL's always has thinking
            # on.
            known = {name: value for name, value in reads.items() if name in str(self.processor.chat_template)}
            asked = {"tokenize": False, "add_generation_prompt": prompt, **known}
            return self.processor.apply_chat_template(copies, tools=tools, **asked)
        except Exception as error:  # a template is a program, and runs on arbitrary records
            whole = len(messages) == len(conversation.messages)
            part, remedy = ("it", _WHOLE) if whole else (f"its first {len(messages)} messages by themselves", _EARLIER)
            raise DataError(conversation.sample_id, f"the chat template refuses {part}: {error}; {remedy}") from error

    def _check_text(self, conversation: Conversation) -> None:
        """Refuse text that would be read as a placeholder, and fields that the template would ignore."""
        self._unwritten.check(conversation)
        for number, message in enumerate(conversation.messages, start=1):
            texts = texts_of(message["content"])
            vision = ("image_token", "video_token", "vision_start_token", "vision_end_token")
            for token in (getattr(self.processor, name) for name in vision):
                if any(token in words for words in texts):
                    place = f"{conversation.sample_id}: message {number}"
                    raise DataError(place, f"found {token!r} in the text, which is reserved for images and videos")


def _refused(conversation: Conversation, error: Exception) -> DataError:
    return DataError(conversation.sample_id, f"the processor refuses it: {error}")


def _parting(first_name: str, first: str, second_name: str, second: str, remedy: str) -> str:
    """Error message for two renderings that should have a common prefix but differ."""
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return (
        f"the chat template renders {first_name} as '...{first[max(at - 20, 0) : at + 20]}', but {second_name} as "
        f"'...{second[max(at - 20, 0) : at + 20]}': expected the second to begin with the first; {remedy}"
    )
