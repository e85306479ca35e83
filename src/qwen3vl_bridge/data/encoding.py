"""Encode conversations as tokens, labels and pixels, with the processor and the chat template of a checkpoint.

At generation a prompt is tokenized without its answer, so here an answer is tokenized separately from the text before
it. Otherwise white space at the beginning of an answer would be joined with the newline at the end of the prompt, and
not be trained on. Until the last step an image is one placeholder token, so that the headers of images suffice to
measure a sample.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from qwen3vl_bridge.data import videos as video
from qwen3vl_bridge.data.chat_template import ChatTemplate, EmptyThinking, Span, texts_of
from qwen3vl_bridge.data.conversations import Conversation, PixelLimits
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media import image_size, load_image
from qwen3vl_bridge.data.packing import Size
from qwen3vl_bridge.data.videos import SampledFrames

import torch
from tokenizers import Encoding
from torch import Tensor
from transformers import AutoProcessor

Answers = Literal["all", "last"]


def check_choice(name: str, found: object, kind: Any) -> None:
    """Raise ValueError if the value `found` of the setting `name` is not a value of `kind`, a `Literal`."""
    allowed = get_args(kind)
    if found not in allowed:
        raise ValueError(f"{name} is {found!r}, expected {' or '.join(map(repr, allowed))}")


@dataclass(unsafe_hash=True)  # not frozen, because Megatron-Bridge's launcher sets overridden fields
class VisionLimits:
    """Resolution and frame limits. None keeps the value of the checkpoint's processor."""

    image_min_pixels: int | None = None  # smaller images are enlarged to this number of pixels
    image_max_pixels: int | None = None  # larger images are reduced to this number of pixels
    video_min_pixels: int | None = None  # summed over the video's frames
    video_max_pixels: int | None = None  # the same
    video_fps: float | None = None  # sampled frames per second
    video_min_frames: int | None = None  # sampled frames; fewer if the video has fewer
    video_max_frames: int | None = None  # sampled frames

    def apply_to(self, processor: Any) -> None:
        """Set these limits in a processor. Raise ValueError if a limit is invalid or a minimum exceeds its maximum."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value!r}, expected a positive number")
        for kind in ("image", "video"):
            reader = getattr(processor, f"{kind}_processor")
            least, most = (getattr(self, f"{kind}_{name}_pixels") for name in ("min", "max"))
            least = reader.size["shortest_edge"] if least is None else least
            most = reader.size["longest_edge"] if most is None else most
            if least > most:
                raise ValueError(
                    f"the minimum for {kind}s, {least} pixels, is greater than the maximum, {most} pixels: reduce "
                    f"{kind}_min_pixels or increase {kind}_max_pixels. None stands for the processor's own limit"
                )
            reader.size = type(reader.size)(shortest_edge=least, longest_edge=most)
        reader = processor.video_processor
        for name in ("fps", "min_frames", "max_frames"):
            if (value := getattr(self, f"video_{name}")) is not None:
                setattr(reader, name, value)
        if reader.min_frames > reader.max_frames:
            raise ValueError(f"video_min_frames is {reader.min_frames}, expected at most {reader.max_frames}")


def load_processor(path: str | Path, limits: VisionLimits | None = None) -> Any:
    """Load the processor of a checkpoint, a local folder or a hub name, and apply `limits`.

    Raises:
        DataError: there is no processor, or it belongs to another model family.
    """
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        from qwen3vl_bridge.checkpoint.formats.huggingface import describe_contents  # for this message alone

        what = f"; {describe_contents(Path(path))}" if Path(path).exists() else ""
        raise DataError(str(path), f"found no processor{what} ({error})") from error
    check_processor(processor, str(path))
    if limits is not None:
        limits.apply_to(processor)
    return processor


def check_processor(processor: Any, place: str) -> None:
    """Raise DataError if a processor lacks a fast tokenizer, an image or video processor, or a chat template."""
    tokenizer: Any = getattr(processor, "tokenizer", None)
    images = getattr(processor, "image_processor", None)
    if not getattr(tokenizer, "is_fast", False) or not hasattr(images, "get_number_of_image_patches"):
        found = type(processor).__name__
        raise DataError(place, f"found {found}, expected a Qwen3VLProcessor with a fast tokenizer")
    if not hasattr(getattr(processor, "video_processor", None), "sample_frames"):
        raise DataError(place, "found no video processor, expected a Qwen3VLVideoProcessor")
    for name in ("image_token", "video_token"):
        token, number = getattr(processor, name), getattr(processor, f"{name}_id")
        if number is None or number == tokenizer.unk_token_id or tokenizer.encode(token) != [number]:
            raise DataError(
                place, f"{name} {token!r} has the id {number}, expected the id of one token of the tokenizer"
            )
    if not getattr(processor, "chat_template", None):
        raise DataError(place, "found no chat template, expected the one that the model was trained with")


@dataclass(frozen=True)
class EncodedSample:
    """One encoded sample with L tokens and N patches.

    The image fields are None if the sample has no images, and the video fields are None if it has no videos.
    """

    input_ids: Tensor  # [L] int64
    labels: Tensor  # [L] int64, the next token; the last label is the token itself, and never trained on
    loss_mask: Tensor  # [L] float32, 1 where the label is trained on
    pixel_values: Tensor | None  # [N, channels * temporal_patch * patch * patch] float32
    image_grid_thw: Tensor | None  # [images, 3] int64
    sample_id: str  # file and line
    pixel_values_videos: Tensor | None = None  # as `pixel_values`
    video_grid_thw: Tensor | None = None  # [videos, 3] int64
    others: tuple[EncodedSample, ...] = ()  # further documents of the same record, see `Conversation.others`
    is_desirable: bool | None = None  # the label of the answer in KTO data
    reference_logps: tuple[float, float] | None = None  # of both documents under a reference model, if known

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def documents(self) -> tuple[EncodedSample, ...]:
        """All documents of the record: first this sample, then `others`."""
        return (self, *self.others)

    @property
    def num_patches(self) -> int:
        """Return the number of patches of images and videos in this sample."""
        return sum(len(pixels) for pixels in (self.pixel_values, self.pixel_values_videos) if pixels is not None)

    @property
    def is_blank(self) -> bool:
        """Return whether this is the sample of a single token that replaces an unreadable sample."""
        return len(self) == 1  # no template renders a conversation as one token


class _Headers(NamedTuple):
    """Sizes from the headers of files: the number of tokens of each image, and the sampled frames of each video."""

    image_tokens: tuple[int, ...]
    videos: tuple[SampledFrames, ...]


class _Tokens(NamedTuple):
    """Tokens of a sample. An image or a frame is a single placeholder token, which stands for `counts` tokens."""

    ids: Tensor  # [n] int64
    trained: Tensor  # [n] bool, whether the token is trained on
    counts: Tensor  # [n] int64; 1 for a text token
    images: tuple[Span, ...]  # first and last index of each image, including its vision start and end tokens
    videos: tuple[Span, ...]  # the same, from the first frame's timestamp on

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def cut(self, limit: int) -> _Tokens:
        """Return the first tokens, at most `limit` after expansion; end before an incomplete image or video."""
        keep = int((self.counts.cumsum(0) <= limit).sum())
        keep = min([keep, *(first for first, last in (*self.images, *self.videos) if first < keep <= last)])
        images, videos = (tuple(one for one in spans if one[1] < keep) for spans in (self.images, self.videos))
        return _Tokens(self.ids[:keep], self.trained[:keep], self.counts[:keep], images, videos)


class Encoder:
    """Encode conversations as `EncodedSample`s. Picklable, so that each data-loading worker can have one."""

    def __init__(
        self,
        processor: Any,
        answers: Answers = "all",
        empty_thinking: EmptyThinking = "prompt",
        reasoning_effort: str | None = None,
        preserve_thinking: bool | None = None,
    ) -> None:
        """Store a processor from `load_processor`; raise ValueError for a setting that the template ignores or rejects.

        Args:
            processor: a processor with a chat template.
            answers: train on "all" assistant messages, or only on the "last". A message with the key "loss" or "weight"
                decides for itself.
            empty_thinking: whether the empty thinking block that the template renders before an answer without
                reasoning is part of the "prompt", or is trained on ("train").
            reasoning_effort: variable of the template, as in Qwen3.8; None for the default of the template.
            preserve_thinking: variable of the template: whether reasoning of answers before the last user message is
                written; None for the default of the template.
        """
        check_choice("answers", answers, Answers)
        check_choice("empty_thinking", empty_thinking, EmptyThinking)
        self.processor, self._only, self._empty = processor, answers, empty_thinking
        self.template = ChatTemplate(
            processor, empty_thinking, reasoning_effort=reasoning_effort, preserve_thinking=preserve_thinking
        )

    @cached_property
    def fingerprint(self) -> str:
        """Return a text that identifies the encoding. It differs if a conversation may get different tokens or pixels.

        It covers the chat template, the tokenizer, the resolution limits, and the answers that are trained on.
        """
        images, clips = self.processor.image_processor, self.processor.video_processor
        sizes = [reader.size[edge] for reader in (images, clips) for edge in ("shortest_edge", "longest_edge")]
        sizes += [getattr(images, name) for name in ("patch_size", "merge_size", "temporal_patch_size")]
        tokenizer = json.loads(self.processor.tokenizer.backend_tokenizer.to_str())
        for passing in ("padding", "truncation"):  # set by the last text that was encoded
            tokenizer.pop(passing, None)
        words = json.dumps([self.processor.chat_template, tokenizer], sort_keys=True)
        digest = hashlib.sha256(words.encode()).hexdigest()[:16]
        asked = (*(() if self._empty == "prompt" else (self._empty,)), *self.template.settings.items())
        return repr((*sizes, clips.fps, clips.min_frames, clips.max_frames, self._only, *asked, digest))

    def size(self, conversation: Conversation, limit: int | None = None) -> Size:
        """Return the size of a conversation's sample in tokens and patches. Only the headers of its images are read.

        With `limit`, return the size after truncation to at most `limit` tokens, which never cuts an image.

        Raises:
            DataError: the conversation cannot be encoded, or has no answer before the limit.
        """
        headers = self._headers(conversation)
        self._check_text(conversation)
        trained = self._trained_messages(conversation)
        tokens = None
        if self.template.is_plain(conversation, trained):
            # The positions of answers matter only for truncation. Locating them takes as long as tokenizing, so these
            # tokens are not kept for encoding; most samples are encoded in another process than they are measured in.
            tokens = self._tokenize(conversation, self.template.render(conversation, trained), (), headers)
        if tokens is None or (limit is not None and tokens.total > limit):
            tokens = self._tokens(conversation, trained, headers, limit)
        merge = self.processor.image_processor.merge_size**2
        frames = [(1, number * merge) for number in headers.image_tokens[: len(tokens.images)]]
        frames += [(clip.grid[0], prod(clip.grid[1:])) for clip in headers.videos[: len(tokens.videos)]]
        return Size(tokens.total, sum(t * n for t, n in frames), sum(t * n**2 for t, n in frames))

    def __call__(self, conversation: Conversation, limit: int | None = None) -> EncodedSample:
        """Return the tokens, labels and pixels of one conversation, truncated to `limit` tokens like in `size`.

        Raises:
            DataError: images do not decode or do not match their placeholders, or an answer cannot be located.
        """
        headers = self._headers(conversation)
        self._check_text(conversation)
        tokens = self._tokens(conversation, self._trained_messages(conversation), headers, limit)
        headers = _Headers(headers.image_tokens[: len(tokens.images)], headers.videos[: len(tokens.videos)])
        pixels: dict[str, Any] = self._pixels(conversation, headers)
        ids, trained = (part.repeat_interleave(tokens.counts) for part in (tokens.ids, tokens.trained))
        return EncodedSample(
            input_ids=ids,
            labels=torch.cat((ids[1:], ids[-1:])),
            loss_mask=torch.cat((trained[1:], trained.new_zeros(1))).float(),
            sample_id=conversation.sample_id,
            **pixels,
        )

    def has_empty_answer(self, conversation: Conversation) -> bool:
        """Return whether an answer that is trained on has neither text nor reasoning nor tool calls."""
        answers = [conversation.messages[number] for number in self._trained_messages(conversation)]
        texts = ([*texts_of(answer["content"]), answer.get("reasoning_content") or ""] for answer in answers)
        said = (any(map(str.strip, words)) for words in texts)
        return any(not (text or answer.get("tool_calls")) for text, answer in zip(said, answers, strict=True))

    def _check_text(self, conversation: Conversation) -> None:
        """Raise DataError if a text contains a vision token, or the template ignores a field of the conversation."""
        self.template.check_fields(conversation)
        for number, message in enumerate(conversation.messages, start=1):
            texts = texts_of(message["content"])
            vision = ("image_token", "video_token", "vision_start_token", "vision_end_token")
            for token in (getattr(self.processor, name) for name in vision):
                if any(token in words for words in texts):
                    place = f"{conversation.sample_id}: message {number}"
                    raise DataError(place, f"found {token!r} in the text, which is reserved for images and videos")

    def _trained_messages(self, conversation: Conversation) -> list[int]:
        """Return the indices of the messages that are trained on; raise DataError if there are none."""
        answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        chosen = answers if self._only == "all" else answers[-1:]
        trained = [number for number in answers if conversation.losses.get(number, number in chosen)]
        if not trained:
            problem = f"found no answer to train on with answers={self._only!r}"
            raise DataError(
                conversation.sample_id, f"{problem}: the keys 'loss' or 'weight' of its messages exclude every answer"
            )
        return trained

    def _headers(self, conversation: Conversation) -> _Headers:
        """Read the sizes of a conversation's images and videos from the headers of the files."""
        place, images = conversation.sample_id, self.processor.image_processor
        sizes = [image_size(image, place) for image in conversation.images]
        limits = [limit._asdict() for limit in self._pixel_limits(conversation)]
        try:
            patches = [
                images.get_number_of_image_patches(*size, limit) for size, limit in zip(sizes, limits, strict=True)
            ]
        except ValueError as error:
            raise DataError(place, f"the processor rejects an image or video: {error}") from error
        videos = (video.sample_frames(clip, self.processor.video_processor, place) for clip in conversation.videos)
        return _Headers(tuple(number // images.merge_size**2 for number in patches), tuple(videos))

    def _pixel_limits(self, conversation: Conversation) -> list[PixelLimits]:
        """Return the minimum and maximum pixels of each image: its own limits, or the limits of the processor."""
        reader = self.processor.image_processor
        found, token = [], (reader.patch_size * reader.merge_size) ** 2
        for number in range(len(conversation.images)):
            own = conversation.limits.get(number, PixelLimits())
            least = reader.size["shortest_edge"] if own.min_pixels is None else own.min_pixels
            most = reader.size["longest_edge"] if own.max_pixels is None else own.max_pixels
            where = f"{conversation.sample_id}: image {number + 1}"
            if own.max_pixels is not None and most < token:
                raise DataError(where, f"found 'max_pixels' {most}, expected at least {token}, the pixels of one token")
            if own != PixelLimits() and least > most:
                raise DataError(
                    where,
                    f"found 'min_pixels' {least} above 'max_pixels' {most}; if an image has only one of them, the "
                    "other is the limit of the processor",
                )
            found.append(PixelLimits(least, most))
        return found

    def _pixels(self, conversation: Conversation, headers: _Headers) -> dict[str, Tensor | None]:
        """Return pixels and grids of the images and videos in `headers`, by field name of `EncodedSample`.

        If the sample was truncated, `headers` has only the first images and videos of the conversation.
        """
        place, reader = conversation.sample_id, self.processor.video_processor
        loaded = [load_image(image, place) for image in conversation.images[: len(headers.image_tokens)]]
        pairs = zip(conversation.videos, headers.videos, strict=False)  # a truncated sample has fewer
        clips = [video.load_frames(clip, sampled, reader, place) for clip, sampled in pairs]
        made_images, made_videos = [], []
        try:
            # One call for all images of the same limits.
            pairs = zip(self._pixel_limits(conversation), loaded, strict=False)
            for limit, run in itertools.groupby(pairs, key=itemgetter(0)):
                images = [image for _, image in run]
                made_images.append(
                    self.processor.image_processor(images=images, **limit._asdict(), return_tensors="pt")
                )
            # Frames are already sampled and resized.
            settings = {"do_sample_frames": False, "do_resize": False, "return_tensors": "pt"}
            made_videos += [reader(videos=[clip], **settings) for clip in clips]
        except (ValueError, RuntimeError) as error:
            raise DataError(place, f"the processor rejects an image or video: {error}") from error
        merge = self.processor.image_processor.merge_size**2
        found = [prod(grid) // merge for made in made_images for grid in made["image_grid_thw"].tolist()]
        found += [tuple(made["video_grid_thw"][0].tolist()) for made in made_videos]
        expected = [*headers.image_tokens, *(sampled.grid for sampled in headers.videos)]
        if found != expected:
            raise DataError(
                place,
                f"the processor made images and videos of {found} (tokens of an image, grid of a video), expected "
                f"{expected} according to their headers",
            )
        return {
            name: torch.cat([one[name] for one in made]) if made else None
            for made, names in (
                (made_images, ("pixel_values", "image_grid_thw")),
                (made_videos, ("pixel_values_videos", "video_grid_thw")),
            )
            for name in names
        }

    def _tokens(
        self, conversation: Conversation, trained: Sequence[int], headers: _Headers, limit: int | None
    ) -> _Tokens:
        text, answers = self.template.render_with_answers(conversation, trained)
        tokens = self._tokenize(conversation, text, answers, headers)
        if limit is None or tokens.total <= limit:
            return tokens
        cut = tokens.cut(limit)
        if not cut.trained[1:].any():
            problem = (
                f"found {tokens.total} tokens, and no answer among the first {cut.total} that remain after truncation"
            )
            raise DataError(conversation.sample_id, f"{problem}, expected an answer within {limit} tokens")
        return cut

    def _tokenize(self, conversation: Conversation, text: str, answers: Sequence[Span], headers: _Headers) -> _Tokens:
        """Return the tokens of a rendered text, in which each image and each video has one placeholder token.

        `answers` are the character spans to train on. Raise DataError if placeholders and media differ in number.
        """
        place, processor, tokenizer = conversation.sample_id, self.processor, self.processor.tokenizer
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can contain
            raise DataError(place, f"found text that is not valid Unicode ({error})") from error
        for kind, token, expected in (
            ("images", processor.image_token, len(headers.image_tokens)),
            ("videos", processor.video_token, len(headers.videos)),
        ):
            if (found := text.count(token)) != expected:
                raise DataError(place, f"the chat template made {found} placeholders for {kind}, expected {expected}")
        text, answers, videos = _insert_video_frames(processor, text, answers, headers.videos)
        # Every second piece is an answer. If there are videos, `starts` has the first character of each token.
        pieces, starts = [], []
        for first, end in itertools.pairwise([0, *itertools.chain.from_iterable(answers), len(text)]):
            encoding = tokenize(tokenizer, text[first:end], begins=first == 0, offsets=bool(videos))
            pieces.append(torch.tensor(encoding.ids, dtype=torch.int64))
            starts += [first + start for start, _ in encoding.offsets] if videos else []
        _check_prompt_tokens(tokenizer, text, answers, pieces, place)
        ids, is_answer = torch.cat(pieces), torch.arange(len(pieces)) % 2 == 1
        trained = is_answer.repeat_interleave(torch.tensor([len(piece) for piece in pieces]))
        merge = processor.video_processor.merge_size**2
        frames = [prod(sampled.grid[1:]) // merge for sampled in headers.videos for _ in range(sampled.grid[0])]
        counts, image = torch.ones_like(ids), ids == processor.image_token_id
        counts[image] = torch.tensor(headers.image_tokens, dtype=counts.dtype)
        counts[ids == processor.video_token_id] = torch.tensor(frames, dtype=counts.dtype)
        # Images are not trained on, even if a template allows them in an assistant's turn.
        start, end = processor.vision_start_token_id, processor.vision_end_token_id
        vision = [processor.image_token_id, processor.video_token_id, start, end]
        never = torch.isin(ids, torch.tensor([number for number in vision if number is not None]))

        def with_ends(first: int, last: int) -> Span:
            """Return a token range, extended by the vision start and end tokens next to it."""
            before = first > 0 and ids[first - 1] == start
            after = last + 1 < len(ids) and ids[last + 1] == end
            return first - int(before), last + int(after)

        clips = tuple((bisect_right(starts, first) - 1, bisect_left(starts, end) - 1) for first, end in videos)
        for first, last in clips:
            trained[first : last + 1] = False  # also the timestamps of its frames
        images = tuple(with_ends(at, at) for at in image.nonzero().squeeze(-1).tolist())
        return _Tokens(ids, trained & ~never, counts, images, clips)


def _insert_video_frames(
    processor: Any, text: str, spans: Sequence[Span], videos: Sequence[SampledFrames]
) -> tuple[str, list[Span], list[Span]]:
    """Replace each video placeholder in a text by one placeholder per frame.

    Return (new text, spans of the answers in it, spans of the videos in it). `spans` are the answers in the old text.
    """
    bare = processor.video_token
    frame = f"{processor.vision_start_token}{bare}{processor.vision_end_token}"
    parts, shifts, found = [], [], []
    last = shift = 0
    for sampled, match in zip(videos, re.finditer(f"{re.escape(frame)}|{re.escape(bare)}", text), strict=True):
        frames = "".join(f"<{time:.1f} seconds>{frame}" for time in sampled.frame_times())
        parts += [text[last : match.start()], frames]
        found.append((match.start() + shift, match.start() + shift + len(frames)))
        last, shift = match.end(), shift + len(frames) - len(match.group())
        shifts.append((match.start(), shift))

    def shifted(offset: int) -> int:
        return offset + next((shift for place, shift in reversed(shifts) if place < offset), 0)

    return "".join([*parts, text[last:]]), [(shifted(start), shifted(end)) for start, end in spans], found


def _check_prompt_tokens(
    tokenizer: Any, text: str, answers: Sequence[Span], pieces: Sequence[Tensor], place: str
) -> None:
    """Raise DataError if an answer is tokenized differently by itself than within the prompt of a later answer.

    At generation the whole prompt is tokenized at once; in training each answer is tokenized separately.
    """
    if len(answers) < 2:
        return
    prompt = torch.tensor(tokenize(tokenizer, text[: answers[-1][0]]).ids, dtype=torch.int64)
    separate = torch.cat(list(pieces[:-2]))
    if torch.equal(prompt, separate):
        return
    common = int((prompt[: len(separate)] == separate[: len(prompt)]).cumprod(0).sum())
    ends = list(itertools.accumulate(map(len, pieces)))[1::2]
    start = next(start for (start, _), end in zip(answers, ends, strict=True) if common < end)
    raise DataError(
        place,
        f"in the prompt of a later answer, the tokenizer joins the beginning of the answer "
        f"{text[start : start + 20]!r}... with the text before it, so its tokens differ there. Remove white space at "
        "its beginning, train on only the last answer with answers='last', or exclude this answer with \"loss\": "
        "false. For an empty thinking block, set empty_thinking='prompt'",
    )


def tokenize(tokenizer: Any, text: str, *, begins: bool = True, offsets: bool = False) -> Encoding:
    """Tokenize a text with the `tokenizers` backend of a fast tokenizer, which is faster than the transformers class.

    The backend gets the settings that transformers would give it. Set `begins` if the text begins a conversation: some
    tokenizers mark the beginning with a token. With `offsets`, which takes longer, the result has the character span of
    each token.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    if offsets:
        return backend.encode(text, add_special_tokens=begins)
    return backend.encode_batch_fast([text], add_special_tokens=begins)[0]
