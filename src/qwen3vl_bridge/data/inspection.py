"""Inspection of a file of conversations: samples as tokens and images, lengths, how full rows are, errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.packing.row_plan import NumberedOrder, RowPlan
from qwen3vl_bridge.data.packing.sample_sizes import Size
from qwen3vl_bridge.data.samples import Samples

import torch
from torch import Tensor

# A run of more tokens without the end of a character is decoded as a whole: decoding it again with each token would
# take quadratic time.
_MOST_HELD = 64


@dataclass(frozen=True)
class Piece:
    """Tokens that form whole characters together, mostly one token; or a run of one vision token, with its text."""

    ids: tuple[int, ...]
    text: str
    trained: bool
    vision: bool = False


@dataclass(frozen=True)
class Picture:
    """An image or a video as the processor returned it."""

    kind: str  # "image" or "video"
    grid: tuple[int, int, int]  # patches in time, height and width
    height: int  # pixels, after resizing
    width: int
    num_tokens: int
    frames: Tensor | None  # [frames, height, width, channels] uint8, if images were requested


@dataclass(frozen=True)
class SampleView:
    """One sample to show."""

    sample_id: str
    pieces: tuple[Piece, ...]
    pictures: tuple[Picture, ...]

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return sum(len(piece.ids) for piece in self.pieces if piece.trained)


@dataclass(frozen=True)
class Inspection:
    """Results of an inspection."""

    num_samples: int  # in the file
    seq_length: int
    pack: bool
    samples: tuple[SampleView, ...]
    lengths: tuple[int, ...]  # tokens of each sample that was measured
    row_fills: tuple[float, ...]  # fraction of real tokens in each row of the measured samples without too long ones
    errors: tuple[tuple[str, str], ...]  # sample and message, in the file's order

    @property
    def too_long(self) -> int:
        """Measured samples that are longer than a row."""
        return sum(length > self.seq_length for length in self.lengths)

    @property
    def trained_share(self) -> float:
        """Fraction of trained tokens in the samples shown."""
        return sum(view.num_trained for view in self.samples) / max(sum(view.num_tokens for view in self.samples), 1)

    @property
    def fill(self) -> float:
        """Fraction of real tokens in all rows."""
        return sum(self.row_fills) / max(len(self.row_fills), 1)


def inspect_samples(
    samples: Samples,
    processor: Any,
    *,
    seq_length: int = 4096,
    show: int = 8,  # samples to show, from number `start` on, or a random choice with `seed`
    start: int = 0,
    seed: int | None = None,
    lengths: int = 2000,  # samples to measure, spread over the whole file; 0 for only those shown
    pack: bool = True,
    pictures: bool = False,  # keep images to show
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,  # wraps numbers of samples
) -> Inspection:
    """Inspect some samples closely, and the lengths of more; a `DataError` for a start after the last sample.

    The limit of `samples` must not be exceeded by any, because long ones are counted here.
    """
    assert samples.total is not None  # streams are not inspected
    total, errors = samples.total, dict[int, str]()
    if seed is not None:
        shown = sorted(random.Random(seed).sample(range(total), min(show, total)))
    elif start < total:
        shown = list(range(start, min(start + show, total)))
    else:
        raise DataError(f"start is {start}, expected less than {total}, the number of samples")
    count = min(lengths, total)  # spread over the whole file: many files are sorted by length or kind
    measured = [place * total // count for place in range(count)] or shown

    def sound[T](indices: Sequence[int], work: Callable[[int], T]) -> Iterator[T]:
        """The result of `work` for each sample; errors are collected."""
        for index in progress(indices):
            try:
                result = work(index)
            except Unreachable:
                raise  # the next sample would wait for the same time, in vain
            except DataError as error:
                errors.setdefault(index, str(error))
            except Exception as error:  # a bug of ours, which could not be found without the sample
                error.add_note(f"while looking at sample {index}, counted from 0")
                raise
            else:
                yield result

    views = tuple(sound(shown, lambda index: view_sample(samples.encode(index), processor, pictures=pictures)))
    found = tuple(sound(measured, lambda index: samples.size(index).tokens))
    row_fills: list[float] = []
    if kept := [length for length in found if length <= seq_length]:
        # How full each row of an epoch is, in a random order as in training.
        order = NumberedOrder(len(kept), seed=0)
        plan = RowPlan(lambda sample: Size(kept[sample], 0, 0), order, capacity=seq_length, pack=pack)
        rows = map(plan.row, range(plan.end_of_epoch()))
        row_fills = [sum(kept[sample] for sample in row) / seq_length for row in rows]
    return Inspection(
        num_samples=total,
        seq_length=seq_length,
        pack=pack,
        samples=views,
        lengths=found,
        row_fills=tuple(row_fills),
        errors=tuple((samples.file.sample_id(index), errors[index]) for index in sorted(errors)),
    )


def without_repeated_advice(messages: Iterable[str]) -> Iterator[str]:
    """Messages of errors, with the advice after the first semicolon only where it appears for the first time."""
    given = set()
    for message in messages:
        problem, _, advice = message.partition("; ")
        yield problem if advice in given else message
        given |= {advice} - {""}


def view_sample(sample: EncodedSample, processor: Any, *, pictures: bool = False) -> SampleView:
    """A sample to show, with its images if `pictures` is set; `processor` is the one that encoded it."""
    vision = (processor.image_token_id, processor.video_token_id)
    # A position's mask is that of its label, the next token. The first token has no position before it.
    trained = [False, *sample.loss_mask[:-1].bool().tolist()]
    return SampleView(
        sample_id=sample.sample_id,
        pieces=tuple(_pieces(sample.input_ids.tolist(), trained, processor.tokenizer, vision)),
        pictures=(
            *_pictures("image", sample.image_grid_thw, sample.pixel_values, processor.image_processor, pictures),
            *_pictures("video", sample.video_grid_thw, sample.pixel_values_videos, processor.video_processor, pictures),
        ),
    )


def _pieces(ids: list[int], trained: list[bool], tokenizer: Any, vision: tuple[int, ...]) -> Iterator[Piece]:
    """A run of one vision token, or the fewest consecutive tokens that form whole characters: a byte-level token may
    end inside of one.
    """

    def decoded(run: list[int]) -> str:
        return tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def kind(token: tuple[int, bool]) -> tuple[bool, int | None]:
        return token[1], token[0] if token[0] in vision else None

    for (is_trained, pad), tokens in groupby(zip(ids, trained, strict=True), key=kind):
        run = [number for number, _ in tokens]
        if pad is not None:
            yield Piece(tuple(run), decoded([pad]), is_trained, vision=True)
            continue
        held: list[int] = []
        for number in run:
            held.append(number)
            if len(held) <= _MOST_HELD and not (text := decoded(held)).endswith("\N{REPLACEMENT CHARACTER}"):
                yield Piece(tuple(held), text, is_trained)
                held = []
        if held:
            yield Piece(tuple(held), decoded(held), is_trained)


def _pictures(kind: str, grids: Tensor | None, pixels: Tensor | None, processor: Any, keep: bool) -> Iterator[Picture]:
    if grids is None or pixels is None:
        return
    for (time, height, width), patches in zip(grids.tolist(), pixels.split(grids.prod(-1).tolist()), strict=True):
        frames = _unpatched(patches, (time, height, width), processor) if keep else None
        yield Picture(
            kind=kind,
            grid=(time, height, width),
            height=height * processor.patch_size,
            width=width * processor.patch_size,
            num_tokens=time * height * width // processor.merge_size**2,
            # An image's other frames are the same.
            frames=frames[:1] if frames is not None and kind == "image" else frames,
        )


def _unpatched(patches: Tensor, grid: tuple[int, int, int], processor: Any) -> Tensor:
    """[frames, height, width, channels] uint8, the frames from which patches were cut, as resized by a processor.

    `patches` are [N, channels * temporal_patch * patch * patch] in merge order, and `grid` their numbers in time,
    height and width. An image has as many equal frames as the temporal patch size.
    """
    time, height, width = grid
    merge, patch, temporal = processor.merge_size, processor.patch_size, processor.temporal_patch_size
    blocks = patches.reshape(time, height // merge, width // merge, merge, merge, -1, temporal, patch, patch)
    frames = blocks.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(time * temporal, height * patch, width * patch, -1)
    values = frames.float()
    if processor.do_normalize:
        values = values * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)
    if processor.do_rescale:
        values = values / processor.rescale_factor
    return values.round().clamp(0, 255).to(torch.uint8)
