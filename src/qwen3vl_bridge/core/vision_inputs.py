"""Compute the vision inputs of a batch on the host: rotary positions, vision slots and the inputs of the vision tower.

A grid is (frames, height, width) in patches; an image has one frame. Patches are in merge order: the merge x merge
patches that become one vision token are consecutive.

Legend: B rows, S tokens per row, T = B * S, K grids or runs of vision tokens, R rows of grids, F frames, N patches,
M = N / merge^2 vision tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import unwrap
from itertools import accumulate
from math import isqrt
from typing import Any, Self

from qwen3vl_bridge.core.device_transfer import Transferable
from qwen3vl_bridge.core.layout import SequenceLayout, make_cu_seqlens, segment_ids, segment_offsets

import torch
from torch import Tensor


@dataclass(frozen=True)
class VisionSettings:
    """Token ids and sizes in a model's config that determine the vision inputs of a batch."""

    image_token_id: int
    video_token_id: int
    spatial_merge_size: int
    num_position_embeddings: int  # position embeddings of the vision tower, which form a square grid

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Return the settings of a transformers config or of a provider."""
        vision = config.vision_config
        return cls(
            config.image_token_id, config.video_token_id, vision.spatial_merge_size, vision.num_position_embeddings
        )


@dataclass(frozen=True)
class VisionInputs(Transferable):
    """Inputs of the vision tower: all images of a batch, then all videos. Patches of a vision token are adjacent."""

    pixel_values: Tensor  # [N, channels * temporal_patch * patch * patch] floating point
    position_ids: Tensor  # [N, 2] int64, row and column of each patch in its frame
    interpolation_index: Tensor  # [4, N] int64, the four position embeddings around each patch
    interpolation_weight: Tensor  # [4, N] float32, their weights; each column sums to one
    cu_seqlens: Tensor  # [F + 1] int32, offsets of the frames in patches; attention does not cross a frame
    lengths: tuple[int, ...]  # the F frame lengths in patches, on the host

    def select(self, frames: Sequence[int]) -> Self:
        """Return the inputs of the frames with indices `frames` (at least one), in this order."""
        starts = list(accumulate(self.lengths, initial=0))
        lengths = tuple(self.lengths[frame] for frame in frames)
        return self._join([(self, slice(starts[frame], starts[frame + 1])) for frame in frames], lengths)

    @classmethod
    def concatenate(cls, several: Sequence[Self]) -> Self:
        """Return one `VisionInputs` with the frames of all `several` inputs (at least one), in order."""
        if len(several) == 1:
            return several[0]
        lengths = tuple(length for inputs in several for length in inputs.lengths)
        return cls._join([(inputs, slice(None)) for inputs in several], lengths)

    @classmethod
    def _join(cls, pieces: Sequence[tuple[Self, slice]], lengths: tuple[int, ...]) -> Self:
        # Copying slices is about ten times as fast as indexing rows.
        return cls(
            pixel_values=torch.cat([inputs.pixel_values[patches] for inputs, patches in pieces]),
            position_ids=torch.cat([inputs.position_ids[patches] for inputs, patches in pieces]),
            interpolation_index=torch.cat([inputs.interpolation_index[:, patches] for inputs, patches in pieces], 1),
            interpolation_weight=torch.cat([inputs.interpolation_weight[:, patches] for inputs, patches in pieces], 1),
            cu_seqlens=make_cu_seqlens(lengths),
            lengths=lengths,
        )


def make_vision_inputs(
    pixel_values: Tensor | None,
    image_grid_thw: Tensor | None,
    pixel_values_videos: Tensor | None,
    video_grid_thw: Tensor | None,
    settings: VisionSettings,
) -> VisionInputs | None:
    """Return the inputs of the vision tower, images first, then videos; None without images and videos.

    Args:
        pixel_values, pixel_values_videos: [patches, features] floating point, or None.
        image_grid_thw, video_grid_thw: [images or videos, 3] integers, or None.

    Raises:
        ValueError: grids are not divisible into tokens, pixels do not match their grids, or the number of position
            embeddings is not a square number.
    """
    side = isqrt(settings.num_position_embeddings)
    if side * side != settings.num_position_embeddings:
        raise ValueError(
            f"found {settings.num_position_embeddings} position embeddings, expected a square number: correct "
            "num_position_embeddings in vision_config"
        )
    merge, pixels, grids = settings.spatial_merge_size, [], []
    for kind, given, sizes in (("image", pixel_values, image_grid_thw), ("video", pixel_values_videos, video_grid_thw)):
        sizes = _check_grids(kind, sizes, merge)
        found, expected = 0 if given is None else len(given), int(sizes.prod(-1).sum())
        if found != expected:
            raise ValueError(f"{kind} pixels: found {found} patches, expected {expected} for {len(sizes)} {kind} grids")
        if given is not None and expected:
            pixels.append(given)
            grids.append(sizes)
    if not pixels:
        return None
    all_grids = torch.cat(grids)
    lengths = tuple(frame_lengths(all_grids).tolist())
    index, weight = interpolation(all_grids, side, merge)
    return VisionInputs(
        pixel_values=torch.cat(pixels) if len(pixels) > 1 else pixels[0],
        position_ids=patch_positions(all_grids, merge),
        interpolation_index=index,
        interpolation_weight=weight,
        cu_seqlens=make_cu_seqlens(lengths),
        lengths=lengths,
    )


def vision_slots(input_ids: Tensor, image_grid_thw: Tensor | None, settings: VisionSettings) -> Tensor:
    """Return the index of each token in the output of the vision tower, or -1 for text: int64, one per token.

    The output has the vision tokens of all images first, then the vision tokens of all videos.

    Raises:
        ValueError: the number of image tokens does not match the grids.
    """
    ids = input_ids.reshape(-1)
    image, video = ids == settings.image_token_id, ids == settings.video_token_id
    patches = 0 if image_grid_thw is None else int(image_grid_thw.prod(-1).sum())
    num_image_tokens = patches // settings.spatial_merge_size**2
    number = image.cumsum(0)
    if int(number[-1]) != num_image_tokens:
        raise ValueError(
            f"found {int(number[-1])} image tokens, expected {num_image_tokens} for the images: pass input_ids and "
            "image_grid_thw from the same call of the processor, and do not truncate rows within an image"
        )
    slots = number.mul_(image).sub_(1)  # in place: allocating new memory would cost more than the sums
    if not video.any():
        return slots
    return torch.where(video, video.cumsum(0).add_(num_image_tokens - 1), slots)


def frame_lengths(grids: Tensor) -> Tensor:
    """Return the number of patches of each of the F frames in grids [K, 3] (frames, height, width), as [F] int64."""
    return (grids[:, 1] * grids[:, 2]).repeat_interleave(grids[:, 0])


def patch_positions(grids: Tensor, merge: int) -> Tensor:
    """Return the row and column in its frame of each of the N patches of grids [K, 3], as [N, 2] in merge order."""
    frames = _for_each_frame(_frame_positions, grids, merge)
    return torch.cat(frames) if frames else torch.zeros(0, 2, dtype=torch.int64)


def interpolation(grids: Tensor, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the four position embeddings around each of N patches [4, N], and their weights [4, N].

    The embeddings form a grid of side x side. The order is upper left, upper right, lower left, lower right. Results
    are bit-identical with those of transformers.
    """
    frames = _for_each_frame(_frame_interpolation, grids, side, merge)
    if not frames:
        return torch.zeros(4, 0, dtype=torch.int64), torch.zeros(4, 0)
    index, weight = zip(*frames, strict=True)
    return torch.cat(index, dim=-1), torch.cat(weight, dim=-1)


def _for_each_frame[T](of_frame: Callable[..., T], grids: Tensor, *settings: int) -> list[T]:
    """Return `of_frame(height, width, *settings)` for each frame.

    Frames of the same size share a result, so callers must not modify it.
    """
    frames = []
    for count, height, width in grids.tolist():
        # Images have few sizes, and all frames of a video have the same, so results are cached, except for the largest
        # frames. This limits the memory: 512 frames of 4,096 patches take 128 MiB.
        make = of_frame if height * width <= 4096 else unwrap(of_frame)
        frames += [make(height, width, *settings)] * count
    return frames


@lru_cache(maxsize=512)
def _frame_positions(height: int, width: int, merge: int) -> Tensor:
    """Return the row and column of each of the N patches of one frame, [N, 2] int64 in merge order."""
    row, column = torch.arange(height, device="cpu")[:, None], torch.arange(width, device="cpu")
    return _to_merge_order(torch.stack(torch.broadcast_tensors(row, column)), merge).T.contiguous()


@lru_cache(maxsize=512)
def _frame_interpolation(height: int, width: int, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return the result of `interpolation` for one frame."""
    (rows, up_down), (columns, left_right) = _axis_interpolation(height, side), _axis_interpolation(width, side)
    shapes = (2, 1, height, 1), (2, 1, width)
    index = (rows * side).view(shapes[0]) + columns.view(shapes[1])
    weight = up_down.view(shapes[0]) * left_right.view(shapes[1])
    return _to_merge_order(index.flatten(0, 1), merge), _to_merge_order(weight.flatten(0, 1), merge)


@lru_cache(maxsize=4096)
def _axis_interpolation(size: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the position embeddings before and after each patch on an axis, and their weights.

    Both tensors have shape [2, size], for `size` patches and `side` position embeddings.
    """
    # Only `linspace` rounds as transformers does. Cached results must not depend on torch's default dtype and device.
    place = torch.linspace(0, side - 1, size, dtype=torch.float32, device="cpu")
    low = place.long()
    beyond = place - low
    return torch.stack((low, (low + 1).clamp(max=side - 1))), torch.stack((1 - beyond, beyond))


def _to_merge_order(raster: Tensor, merge: int) -> Tensor:
    """Reorder values of patches from [C, height, width] to [C, height * width], with merge x merge patches adjacent."""
    channels, height, width = raster.shape
    tiles = raster.view(channels, height // merge, merge, width // merge, merge)
    return tiles.transpose(2, 3).reshape(channels, -1)


def mrope_positions(
    input_ids: Tensor,
    layout: SequenceLayout,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None,
    settings: VisionSettings,
) -> Tensor:
    """Return multimodal rotary positions [3, B, S] int64: temporal, height and width.

    Each segment has the positions that transformers' `get_rope_index` returns for that segment alone. A text token has
    the same position on all three axes, and the next text token has the next position. If the first token of an image
    or a video frame is at position p, the token in its row r and column c is at (p, p + r, p + c). The token after the
    image or frame is at p plus the number of its rows or columns, whichever is larger. Padding is at position 0.

    Args:
        input_ids: [B, S].
        image_grid_thw, video_grid_thw: [K, 3] in patches, in the order of their tokens.

    Raises:
        ValueError: `input_ids` has another shape than the layout; the number of vision tokens does not match the
            grids; or the tokens of an image or frame are interrupted by other tokens, by padding or by the end of
            their segment.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != layout.num_rows or input_ids.numel() != layout.total:
        raise ValueError(
            f"input_ids: found {list(input_ids.shape)}, expected "
            f"[{layout.num_rows}, {layout.total // layout.num_rows}] for this layout"
        )
    ids, merge = input_ids.reshape(-1), torch.tensor([1, settings.spatial_merge_size, settings.spatial_merge_size])
    images = _check_grids("image", image_grid_thw, settings.spatial_merge_size) // merge
    videos = _check_grids("video", video_grid_thw, settings.spatial_merge_size) // merge
    frames = videos.repeat_interleave(videos[:, 0], dim=0)  # each frame of a video has its own run of tokens
    frames[:, 0] = 1
    segment_of = layout.segment_ids()
    image, video = ids == settings.image_token_id, ids == settings.video_token_id
    image_starts = _find_vision_runs("image", image, images, layout, segment_of)
    video_starts = _find_vision_runs("video", video, frames, layout, segment_of)
    starts, sides = torch.cat((image_starts, video_starts)), torch.cat((images, frames))

    # Positions are the cumulative sum of `step` [3, T]: 1 on each axis inside text, (0, 0, 1) inside a row of an image,
    # and 0 in padding. What follows corrects the steps of other tokens.
    padding = layout.padding_mask()
    text = ~(padding | image | video)
    step = torch.stack((text, text, ~padding)).long()
    # The first row of a run starts where text would continue. Later rows return to the run's first column, and new
    # frames to its first row.
    num_rows = sides[:, 0] * sides[:, 1]
    run, row = segment_ids(num_rows), segment_offsets(num_rows)
    _, height, width = sides[run].unbind(-1)
    later, first_of_frame = (row > 0).long(), (row % height == 0).long()
    step[:, starts[run] + row * width] = torch.stack(
        (first_of_frame, 1 - first_of_frame * later * height, 1 - later * width)
    )
    # The token after a run continues after the longer of its sides. The last run may have no token after it.
    run_lengths, longer = sides.prod(-1), sides[:, 1:].amax(-1)
    ends = starts + run_lengths
    has_next = ends < layout.total
    step[:, ends[has_next]] = (longer - (sides - 1).T)[:, has_next]
    # Segments start at 0.
    segment_starts = layout.cu_seqlens_padded[:-1].long()
    step[:, segment_starts] = 0
    # The first padding token of a segment subtracts the segment's last position.
    real = layout.cu_seqlens.diff()
    stops = segment_starts + real
    segment = segment_of[starts]
    count = real.long().index_add(0, segment, longer - run_lengths)
    last = (count - 1).repeat(3, 1)
    closing = ends == stops[segment]  # runs at the end of their segment
    last[:, segment[closing]] = (count[segment] - longer + (sides - 1).T)[:, closing]
    back = (real > 0) & (stops < layout.total)
    step[:, stops[back]] = -last[:, back]
    return step.cumsum_(-1).view(3, *input_ids.shape)  # in place: allocating new memory takes as long as the sum


def _find_vision_runs(
    kind: str, is_vision: Tensor, sides: Tensor, layout: SequenceLayout, segment_of: Tensor
) -> Tensor:
    """Return [K], the index of the first token of each of K images or video frames with `sides` [K, 3] in tokens.

    Raises:
        ValueError: the tokens of an image or frame are not consecutive tokens of one segment.
    """
    fenced = torch.zeros(len(is_vision) + 2, dtype=torch.bool)
    fenced[1:-1] = is_vision
    begins, ends = (fenced[1:] != fenced[:-1]).nonzero().view(-1, 2).unbind(-1)  # of consecutive vision tokens
    before = (ends - begins).cumsum(0) - (ends - begins)
    lengths, unit = sides.prod(-1), "image" if kind == "image" else "video frame"
    first_number = lengths.cumsum(0) - lengths  # number of a run's first token among the kind's tokens
    if (found := int((ends - begins).sum())) != (expected := int(lengths.sum())):
        raise ValueError(f"found {found} {kind} tokens in the batch, expected {expected} for {len(sides)} {unit}s")
    stretch = torch.searchsorted(before, first_number, right=True) - 1
    starts = begins[stretch] + first_number - before[stretch]
    segment = segment_of[starts]
    stops = layout.cu_seqlens_padded[segment] + layout.cu_seqlens.diff()[segment]  # of real tokens
    broken = starts + lengths > torch.minimum(ends[stretch], stops)
    if broken.any():
        first = int(broken.nonzero()[0])
        raise ValueError(
            f"segment {segment[first]}: the tokens of {unit} {first} ({_format_grid(sides[first])}) are interrupted: "
            f"they begin at token {starts[first]} of the batch, expected {lengths[first]} consecutive tokens before "
            "the padding"
        )
    return starts


def _check_grids(kind: str, grids: Tensor | None, merge: int) -> Tensor:
    """Return grids [K, 3] as int64, or an empty tensor for None. `kind` is the word for them in error messages.

    Raises:
        ValueError: the grids have another shape, or the vision tower cannot divide them into vision tokens.
    """
    if grids is None:
        return torch.zeros(0, 3, dtype=torch.int64)
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.is_floating_point():
        raise ValueError(f"{kind} grids: found {list(grids.shape)} {grids.dtype}, expected [K, 3] integers")
    bad = (grids < 1).any(-1) | (grids[:, 1:] % merge != 0).any(-1)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"{kind} {first}: found a grid of {_format_grid(grids[first])} patches, "
            f"expected positive numbers with height and width divisible by {merge}"
        )
    return grids.long()


def _format_grid(grid: Tensor) -> str:
    return " x ".join(str(side) for side in grid.tolist())
