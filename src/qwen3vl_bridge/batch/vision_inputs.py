"""Computed on the host from a batch's token ids and image grids: rotary positions, vision slots, the tower's inputs.

A grid is (frames, height, width) in patches; an image has one frame. Patches are in merge order: the merge x merge
patches that become one token are consecutive.
Legend: B rows, S tokens a row, T = B * S, K grids or runs of vision tokens, R their rows, F frames, N patches, M = N /
merge^2 vision tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import unwrap
from itertools import accumulate
from math import isqrt
from typing import Self

from qwen3vl_bridge.batch.device_transfer import Movable
from qwen3vl_bridge.batch.token_layout import SequenceLayout, offsets_of

import torch
from torch import Tensor


def check_grids(kind: str, grids: Tensor | None, merge: int) -> Tensor:
    """The grids [K, 3] as int64, if the vision tower can read them; `kind` is "image" or "video", for messages.

    Raises:
        ValueError: another shape, or a side that is not positive or not divisible by `merge`.
    """
    if grids is None:
        return torch.zeros(0, 3, dtype=torch.int64)
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.is_floating_point():
        raise ValueError(f"{kind} grids: found {list(grids.shape)} {grids.dtype}, expected [K, 3] integers")
    bad = (grids < 1).any(-1) | (grids[:, 1:] % merge != 0).any(-1)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"{kind} {first}: found a grid of {describe(grids[first])} patches, "
            f"expected positive numbers with height and width divisible by {merge}"
        )
    return grids.long()


def frames(grids: Tensor) -> Tensor:
    """[F, 3], each of K grids [K, 3] as separate frames of (1, height, width)."""
    repeated = grids.repeat_interleave(grids[:, 0], dim=0)
    repeated[:, 0] = 1
    return repeated


def frame_lengths(grids: Tensor) -> Tensor:
    """[F] int64, patches of each frame of the grids [K, 3]. Vision attention does not cross a frame."""
    return (grids[:, 1] * grids[:, 2]).repeat_interleave(grids[:, 0])


def describe(grid: Tensor) -> str:
    """A grid as text, such as "1 x 16 x 24"."""
    return " x ".join(str(side) for side in grid.tolist())


@dataclass(frozen=True)
class VisionInputs(Movable):
    """All images of a batch and then its videos, as the vision tower reads them; patches in merge order."""

    pixel_values: Tensor  # [N, channels * temporal_patch * patch * patch] floating point
    position_ids: Tensor  # [N, 2] int64, row and column of each patch in its frame
    interpolation_index: Tensor  # [4, N] int64, the four position embeddings around each patch
    interpolation_weight: Tensor  # [4, N] float32, their weights; each column sums to one
    cu_seqlens: Tensor  # [F + 1] int32, offsets of the frames in patches. Attention does not cross a frame
    lengths: tuple[int, ...]  # the F frame lengths in patches, on the host

    def select(self, frames: Sequence[int]) -> Self:
        """Some of the frames (at least one), in the given order. Pixels may be on a device; the rest is on the host."""
        starts = list(accumulate(self.lengths, initial=0))
        lengths = tuple(self.lengths[frame] for frame in frames)
        return self._joined([(self, slice(starts[frame], starts[frame + 1])) for frame in frames], lengths)

    @classmethod
    def concatenated(cls, several: Sequence[Self]) -> Self:
        """All frames of at least one."""
        lengths = tuple(length for one in several for length in one.lengths)
        return several[0] if len(several) == 1 else cls._joined([(one, slice(None)) for one in several], lengths)

    @classmethod
    def _joined(cls, parts: Sequence[tuple[Self, slice]], lengths: tuple[int, ...]) -> Self:
        return cls(  # copying slices is about ten times as fast as indexing rows
            pixel_values=torch.cat([one.pixel_values[patches] for one, patches in parts]),
            position_ids=torch.cat([one.position_ids[patches] for one, patches in parts]),
            interpolation_index=torch.cat([one.interpolation_index[:, patches] for one, patches in parts], 1),
            interpolation_weight=torch.cat([one.interpolation_weight[:, patches] for one, patches in parts], 1),
            cu_seqlens=offsets_of(lengths),
            lengths=lengths,
        )


def vision_slots(input_ids: Tensor, image_token_id: int, video_token_id: int, num_image_tokens: int) -> Tensor:
    """[T] int64 index of each vision token in the tower's output, where images come first; -1 for other tokens.

    Raises:
        ValueError: the number of image tokens is not `num_image_tokens`.
    """
    ids = input_ids.reshape(-1)
    image, video = ids == image_token_id, ids == video_token_id
    rank = image.cumsum(0)
    if int(rank[-1]) != num_image_tokens:
        raise ValueError(f"found {int(rank[-1])} image tokens, expected {num_image_tokens} for the images")
    slots = rank.mul_(image).sub_(1)  # in place: allocating new memory would cost more than the sums
    if not video.any():
        return slots
    return torch.where(video, video.cumsum(0).add_(num_image_tokens - 1), slots)


def patch_positions(grids: Tensor, merge: int) -> Tensor:
    """[N, 2] int64, row and column of each patch in its frame, in merge order, for grids [K, 3]."""
    frames = _for_each_frame(_frame_positions, grids, merge)
    return torch.cat(frames) if frames else torch.zeros(0, 2, dtype=torch.int64)


def interpolation(grids: Tensor, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """[4, N] int64 rows of a square embedding table, `side` long, around each patch, and [4, N] float32 their weights.

    Upper left, upper right, lower left, lower right; bit-identical to those of transformers.
    """
    frames = _for_each_frame(_frame_interpolation, grids, side, merge)
    if not frames:
        return torch.zeros(4, 0, dtype=torch.int64), torch.zeros(4, 0)
    index, weight = zip(*frames, strict=True)
    return torch.cat(index, dim=-1), torch.cat(weight, dim=-1)


def _for_each_frame[T](of_frame: Callable[..., T], grids: Tensor, *settings: int) -> list[T]:
    """[F] result of `of_frame` for the height and width of each frame. It may be shared: copy it, do not change it.

    Images have few sizes and a video's frames one, so results are cached, except for the largest, which bounds the
    memory: 512 frames of 4,096 patches take 128 MiB.
    """
    frames = []
    for count, height, width in grids.tolist():
        make = of_frame if height * width <= 4096 else unwrap(of_frame)
        frames += [make(height, width, *settings)] * count
    return frames


@lru_cache(maxsize=512)
def _frame_positions(height: int, width: int, merge: int) -> Tensor:
    """[N, 2] int64, row and column of each patch of one frame."""
    row, column = torch.arange(height, device="cpu")[:, None], torch.arange(width, device="cpu")
    return _merged(torch.stack(torch.broadcast_tensors(row, column)), merge).T.contiguous()


@lru_cache(maxsize=512)
def _frame_interpolation(height: int, width: int, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """[4, N] int64 and [4, N] float32 of one frame, as in `interpolation`."""
    (rows, up_down), (columns, left_right) = _axis(height, side), _axis(width, side)
    shapes = (2, 1, height, 1), (2, 1, width)
    index = (rows * side).view(shapes[0]) + columns.view(shapes[1])
    weight = up_down.view(shapes[0]) * left_right.view(shapes[1])
    return _merged(index.flatten(0, 1), merge), _merged(weight.flatten(0, 1), merge)


def _merged(raster: Tensor, merge: int) -> Tensor:
    """A frame [C, height, width] as [C, height * width] in merge order."""
    channels, height, width = raster.shape
    tiles = raster.view(channels, height // merge, merge, width // merge, merge)
    return tiles.transpose(2, 3).reshape(channels, -1)


@lru_cache(maxsize=4096)
def _axis(size: int, side: int) -> tuple[Tensor, Tensor]:
    """[2, size] int64 the embeddings before and after each patch of an axis, [2, size] float32 their weights.

    Only `linspace` rounds as transformers does. Cached results must not depend on torch's default dtype and device.
    """
    place = torch.linspace(0, side - 1, size, dtype=torch.float32, device="cpu")
    low = place.long()
    beyond = place - low
    return torch.stack((low, (low + 1).clamp(max=side - 1))), torch.stack((1 - beyond, beyond))


def make_vision_inputs(
    pixel_values: Tensor | None,
    image_grid_thw: Tensor | None,
    pixel_values_videos: Tensor | None,
    video_grid_thw: Tensor | None,
    *,
    num_position_embeddings: int,
    spatial_merge_size: int,
) -> VisionInputs | None:
    """The vision tower's inputs, images first, then videos; None if there are none.

    Pixels are [patches, features] floating point, grids [images or videos, 3] integers; None without images or videos.
    `num_position_embeddings` is the size of the tower's square embedding table.

    Raises:
        ValueError: grids that do not divide, a number of patches that differs from the grids', or a table size that is
            not a square.
    """
    side = isqrt(num_position_embeddings)
    if side * side != num_position_embeddings:
        raise ValueError(f"found {num_position_embeddings} position embeddings, expected a square number")
    images = check_grids("image", image_grid_thw, spatial_merge_size)
    videos = check_grids("video", video_grid_thw, spatial_merge_size)
    parts = [_check_pixels("image", pixel_values, images), _check_pixels("video", pixel_values_videos, videos)]
    pixels = [part for part in parts if part is not None]
    if not pixels:
        return None
    grids = torch.cat((images, videos))
    lengths = tuple(frame_lengths(grids).tolist())
    index, weight = interpolation(grids, side, spatial_merge_size)
    return VisionInputs(
        pixel_values=torch.cat(pixels) if len(pixels) > 1 else pixels[0],
        position_ids=patch_positions(grids, spatial_merge_size),
        interpolation_index=index,
        interpolation_weight=weight,
        cu_seqlens=offsets_of(lengths),
        lengths=lengths,
    )


def _check_pixels(kind: str, pixels: Tensor | None, grids: Tensor) -> Tensor | None:
    """The pixels, if their number of patches is that of the grids; None if there are neither."""
    found, expected = 0 if pixels is None else len(pixels), int(grids.prod(-1).sum())
    if found != expected:
        raise ValueError(f"{kind} pixels: found {found} patches, expected {expected} for {len(grids)} {kind} grids")
    return pixels if expected else None


def mrope_positions(
    input_ids: Tensor,
    layout: SequenceLayout,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None,
    *,
    image_token_id: int,
    video_token_id: int,
    spatial_merge_size: int,
) -> Tensor:
    """Multimodal rotary positions [3, B, S] int64, those of transformers' `get_rope_index` for each segment separately.

    Text tokens increase the temporal, height and width position by one. Within a run of vision tokens (an image, or one
    frame of a video) each is the run's start plus the token's frame, row or column; the next token continues after the
    longer side. Positions restart in each segment. Padding is at position 0. Grids [K, 3] are in patches, in the order
    of their tokens; each frame of a video has its own run of tokens.

    Raises:
        ValueError: the number of tokens differs from the layout's, or vision tokens and grids disagree: in number, or
            because an image's tokens are not one run inside one segment, or are in padding.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != layout.num_rows or input_ids.numel() != layout.total:
        raise ValueError(
            f"input_ids: found {list(input_ids.shape)}, expected "
            f"[{layout.num_rows}, {layout.total // layout.num_rows}] as the layout has it"
        )
    ids, merge = input_ids.reshape(-1), torch.tensor([1, spatial_merge_size, spatial_merge_size])
    images = check_grids("image", image_grid_thw, spatial_merge_size) // merge
    videos = frames(check_grids("video", video_grid_thw, spatial_merge_size)) // merge
    image, image_starts = _vision_runs("image", ids, image_token_id, images, layout)
    video, video_starts = _vision_runs("video", ids, video_token_id, videos, layout)
    padding = layout.padding_mask()
    text = ~(padding | image | video)
    step = torch.stack((text, text, ~padding)).long()
    _step_through_runs(step, torch.cat((image_starts, video_starts)), torch.cat((images, videos)), layout)
    return step.cumsum_(-1).view(3, *input_ids.shape)  # in place: allocating new memory takes as long as the sum


def _step_through_runs(step: Tensor, starts: Tensor, sides: Tensor, layout: SequenceLayout) -> None:
    """Correct `step` [3, T], whose cumulative sums are the positions, where tokens do not just follow each other.

    `step` has each token's position minus that of the token before it, as inside a text (1 on each axis), inside a row
    of an image (0, 0, 1) and in padding (0). Corrected here are the first tokens of an image's rows, of segments, and
    those after an image or a segment. Images and frames begin at `starts` [K] and have `sides` [K, 3] in tokens.
    """
    lengths, longer = sides.prod(-1), sides[:, 1:].amax(-1)
    rows = sides[:, 0] * sides[:, 1]
    run = torch.arange(len(sides)).repeat_interleave(rows)
    row = torch.arange(len(run)) - (rows.cumsum(0) - rows)[run]  # within its run, over all frames
    _, height, width = sides[run].unbind(-1)
    token = starts[run] + row * width
    # The first row of a run starts where text would continue; later rows return to the run's first column, and new
    # frames to its first row.
    later, frame = (row > 0).long(), (row % height == 0).long()
    step[:, token] = torch.stack((frame, 1 - frame * later * height, 1 - later * width))
    # The token after a run continues after the longer of its sides. The last run of a batch may have no token after it.
    ends = starts + lengths
    after = ends < layout.total
    step[:, ends[after]] = (longer - (sides - 1).T)[:, after]
    begins = layout.cu_seqlens_padded[:-1].long()
    step[:, begins] = 0
    # Where a segment's real tokens end, its last position is subtracted again.
    real = layout.cu_seqlens.diff()
    stops = begins + real
    segment = _segment(layout, starts)
    count = real.long().index_add(0, segment, longer - lengths)
    last = (count - 1).repeat(3, 1)
    closing = ends == stops[segment]
    last[:, segment[closing]] = (count[segment] - longer + (sides - 1).T)[:, closing]
    back = (real > 0) & (stops < layout.total)
    step[:, stops[back]] = -last[:, back]


def _vision_runs(kind: str, ids: Tensor, token_id: int, sides: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """[T] bool, True for the kind's tokens, and [K] the first token of each run: of an image, or a frame of a video.

    Consecutive vision tokens may be several runs, because images need no token between them. A `ValueError` if runs do
    not fit the grids, whose `sides` [K, 3] are in tokens.
    """
    fenced = torch.zeros(len(ids) + 2, dtype=torch.bool)
    inside = torch.eq(ids, token_id, out=fenced[1:-1])
    begins, ends = (fenced[1:] != fenced[:-1]).nonzero().view(-1, 2).unbind(-1)  # of consecutive vision tokens
    before = (ends - begins).cumsum(0) - (ends - begins)
    lengths, unit = sides.prod(-1), "image" if kind == "image" else "video frame"
    rank = lengths.cumsum(0) - lengths
    if (found := int((ends - begins).sum())) != (expected := int(lengths.sum())):
        raise ValueError(f"found {found} {kind} tokens in the batch, expected {expected} for {len(sides)} {unit}s")
    stretch = torch.searchsorted(before, rank, right=True) - 1
    starts = begins[stretch] + rank - before[stretch]
    segment = _segment(layout, starts)
    stops = layout.cu_seqlens_padded[segment] + layout.cu_seqlens.diff()[segment]  # of real tokens
    broken = starts + lengths > torch.minimum(ends[stretch], stops)
    if broken.any():
        first = int(broken.nonzero()[0])
        raise ValueError(
            f"segment {segment[first]}: the tokens of {unit} {first} ({describe(sides[first])}) begin at token "
            f"{starts[first]} of the batch and break off, expected {lengths[first]} in a row before its padding"
        )
    return inside, starts


def _segment(layout: SequenceLayout, tokens: Tensor) -> Tensor:
    """Index of the segment that contains each token, for `tokens` [any] of the flat batch."""
    return torch.searchsorted(layout.cu_seqlens_padded.long(), tokens, right=True) - 1
