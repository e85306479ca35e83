"""Tokenizes a rendered conversation, with one token for each image until the end.

What lives here: the positions of images and of a video's frames among the tokens, and truncating a sample outside
images. What may not: templates (`encoding.py`), pixels (`data/media/images.py`, `data/media/videos.py`).

At generation a prompt is tokenized without its answer, so an answer is tokenized apart from what precedes it: otherwise
white space at its beginning is joined with the newline that ends the prompt, and is not trained on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.videos import Sampled

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]

# The backend functions that a fast tokenizer's call runs.
_OF_FAST = {
    name: getattr(PreTrainedTokenizerFast, name, None)
    for name in ("__call__", "_encode_plus", "_switch_to_input_mode", "set_truncation_and_padding")
}


class Seen(NamedTuple):
    """Sizes of a conversation's images and videos, from their headers.

    Attributes:
        image_tokens: number of tokens of each image.
        videos: sampled frames of each video.
    """

    image_tokens: tuple[int, ...]
    videos: tuple[Sampled, ...]


@dataclass(frozen=True)
class Tokens:
    """Tokens of a sample; an image or a frame has one token, which stands for `counts` tokens.

    Attributes:
        ids: [n] int64.
        trained: [n] bool, whether each is trained on.
        counts: [n] int64.
        images: first and last index of each image, including its vision start and end tokens.
        videos: the same for each video, from the first frame's timestamp on.
    """

    ids: Tensor
    trained: Tensor
    counts: Tensor
    images: tuple[Span, ...]
    videos: tuple[Span, ...]

    def __len__(self) -> int:
        return int(self.counts.sum())

    def cut(self, limit: int) -> Tokens:
        """At most `limit` tokens from the beginning, without images and videos that are not complete."""
        keep = int((self.counts.cumsum(0) <= limit).sum())
        keep = min([keep, *(first for first, last in (*self.images, *self.videos) if first < keep <= last)])
        return Tokens(
            self.ids[:keep],
            self.trained[:keep],
            self.counts[:keep],
            tuple(span for span in self.images if span[1] < keep),
            tuple(span for span in self.videos if span[1] < keep),
        )

    def whole(self) -> tuple[Tensor, Tensor]:
        """`ids` and `trained` with every token of every image: [L] int64, [L] bool."""
        return self.ids.repeat_interleave(self.counts), self.trained.repeat_interleave(self.counts)


def tokenise(processor: Any, text: str, answers: Sequence[Span], seen: Seen, place: str) -> Tokens:
    """The tokens of a text, in which each image and each video has one placeholder token.

    Args:
        processor: of the checkpoint.
        text: the rendered conversation.
        answers: spans of characters that are trained on.
        seen: sizes of the images and videos.
        place: the conversation, for messages.

    Raises:
        DataError: the number of placeholders differs from that of images or videos, the text is not valid Unicode, or
            an answer has other tokens in the prompts of later ones.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can contain
        raise DataError(place, f"found text that is not valid Unicode ({error})") from error
    for kind, token, expected in (
        ("images", processor.image_token, len(seen.image_tokens)),
        ("videos", processor.video_token, len(seen.videos)),
    ):
        if (found := text.count(token)) != expected:
            raise DataError(place, f"the chat template made {found} placeholders for {kind}, expected {expected}")
    text, answers, videos = _with_frames(processor, text, answers, seen.videos)
    pieces, starts = [], torch.empty(0, dtype=torch.int64)  # every second piece is an answer
    for first, end in itertools.pairwise([0, *itertools.chain.from_iterable(answers), len(text)]):
        if videos:  # whose places are needed
            piece, places = ids_and_starts(processor.tokenizer, text[first:end], begins=first == 0)
            starts = torch.cat((starts, places + first))
        else:
            piece = ids_of(processor.tokenizer, text[first:end], begins=first == 0)
        pieces.append(piece)
    _check_prompts(processor.tokenizer, text, answers, pieces, place)
    ids, is_answer = torch.cat(pieces), torch.arange(len(pieces)) % 2 == 1
    trained = is_answer.repeat_interleave(torch.tensor([len(piece) for piece in pieces]))
    merge = processor.video_processor.merge_size**2
    frames = [prod(sampled.grid[1:]) // merge for sampled in seen.videos for _ in range(sampled.grid[0])]
    counts, image = torch.ones_like(ids), ids == processor.image_token_id
    counts[image] = torch.tensor(seen.image_tokens, dtype=counts.dtype)
    counts[ids == processor.video_token_id] = torch.tensor(frames, dtype=counts.dtype)
    # Images are not trained on, even if a template allows them in an assistant's turn.
    vision = [processor.image_token_id, processor.video_token_id]
    around = [processor.vision_start_token_id, processor.vision_end_token_id]
    never = torch.isin(ids, torch.tensor([number for number in vision + around if number is not None]))

    def spread(first: int, last: int) -> Span:
        """A range of tokens, including the vision start and end tokens around it."""
        before = first > 0 and ids[first - 1] == around[0]
        after = last + 1 < len(ids) and ids[last + 1] == around[1]
        return first - int(before), last + int(after)

    clips = tuple(
        (int(torch.searchsorted(starts, first, right=True)) - 1, int(torch.searchsorted(starts, end)) - 1)
        for first, end in videos
    )
    for first, last in clips:
        trained[first : last + 1] = False  # also the timestamps of its frames
    pictures = tuple(spread(at, at) for at in image.nonzero().squeeze(-1).tolist())
    return Tokens(ids, trained & ~never, counts, pictures, clips)


def _check_prompts(tokenizer: Any, text: str, answers: Sequence[Span], pieces: Sequence[Tensor], place: str) -> None:
    """Refuse an answer that has other tokens in the prompt of a later answer, which is tokenized in one piece."""
    if len(answers) < 2:
        return
    prompt = ids_of(tokenizer, text[: answers[-1][0]])
    apart = torch.cat(list(pieces[:-2]))
    if torch.equal(prompt, apart):
        return
    common = int((prompt[: len(apart)] == apart[: len(prompt)]).cumprod(0).sum())
    ends = list(itertools.accumulate(map(len, pieces)))[1::2]
    start = next(start for (start, _), end in zip(answers, ends, strict=True) if common < end)
    raise DataError(
        place,
        f"the tokenizer joins the beginning of the answer {text[start : start + 20]!r}... with what precedes it where "
        "it is part of a later answer's prompt, so its tokens differ there; take out white space at its beginning, "
        "train on only the last answer with answers='last', leave this one out with \"loss\": false, or, for an empty "
        "thinking block, set empty_thinking='prompt'",
    )


def ids_of(tokenizer: Any, text: str, begins: bool = True) -> Tensor:
    """[n] int64 ids of a text's tokens. Without their offsets, a fast tokenizer takes a third of the time."""
    backend = _backend_of(tokenizer)
    if backend is None:
        return ids_and_starts(tokenizer, text, begins)[0]
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=begins)
    return torch.tensor(encoding.ids, dtype=torch.int64)


def ids_and_starts(tokenizer: Any, text: str, begins: bool = True) -> tuple[Tensor, Tensor]:
    """The tokens of a text.

    Args:
        tokenizer: a fast tokenizer.
        text: the text.
        begins: whether a conversation begins with it, for tokenizers that mark the beginning.

    Returns:
        [n] int64 ids, and [n] int64 the index of each one's first character.
    """
    backend = _backend_of(tokenizer)
    if backend is None:
        encoded = tokenizer(text, add_special_tokens=begins, return_offsets_mapping=True, return_tensors="pt")
        return encoded["input_ids"][0].long(), encoded["offset_mapping"].long().reshape(-1, 2)[:, 0].contiguous()
    encoding = backend.encode(text, add_special_tokens=begins)
    starts = [start for start, _ in encoding.offsets]
    return torch.tensor(encoding.ids, dtype=torch.int64), torch.tensor(starts, dtype=torch.int64)


def _backend_of(tokenizer: Any) -> Any:
    """The backend of a fast tokenizer, set as transformers sets it for one text; the wrapper around the backend takes
    longer than encoding. None for a tokenizer with its own code for encoding.
    """
    if any(getattr(type(tokenizer), name, None) is not found for name, found in _OF_FAST.items()):
        return None
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _with_frames(
    processor: Any, text: str, spans: Sequence[Span], videos: Sequence[Sampled]
) -> tuple[str, list[Span], list[Span]]:
    """A text in which each frame of a video has its own placeholder; the answers' spans there, and those of the videos.

    As Qwen3-VL was trained, the frames replace the template's vision start, video and vision end tokens. transformers
    5.12 leaves the start and end tokens around them; 4.57 did not.
    """
    bare = processor.video_token
    one = f"{processor.vision_start_token}{bare}{processor.vision_end_token}"
    parts, shifts, found = [], [], []
    last = shift = 0
    for sampled, match in zip(videos, re.finditer(f"{re.escape(one)}|{re.escape(bare)}", text), strict=True):
        frames = "".join(f"<{time:.1f} seconds>{one}" for time in sampled.frame_times())
        parts += [text[last : match.start()], frames]
        found.append((match.start() + shift, match.start() + shift + len(frames)))
        last, shift = match.end(), shift + len(frames) - len(match.group())
        shifts.append((match.start(), shift))

    def there(offset: int) -> int:
        return offset + next((shift for place, shift in reversed(shifts) if place < offset), 0)

    return "".join([*parts, text[last:]]), [(there(start), there(end)) for start, end in spans], found
