"""What the vision tower reads of a batch's images and videos, computed on the host from their grids.

A grid is (frames, height, width) in patches; an image has one frame. Patches are in merge order: the merge x merge
patches that become one token are consecutive.
Legend: K grids, F frames, N patches, M = N / merge^2 vision tokens, T tokens.
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

import torch
from torch import Tensor


def check_grids(kind: str, grids: Tensor | None, merge: int) -> Tensor:
    """Check that the vision tower can read the grids.

    Args:
        kind: "image" or "video", for messages.
        grids: [K, 3] integers, or None for none.
        merge: patches that become one token, along each side.

    Returns:
        [K, 3] int64.

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
    one = grids.repeat_interleave(grids[:, 0], dim=0)
    one[:, 0] = 1
    return one


def frame_lengths(grids: Tensor) -> Tensor:
    """[F] int64, patches of each frame of the grids [K, 3]. Vision attention does not cross a frame."""
    return (grids[:, 1] * grids[:, 2]).repeat_interleave(grids[:, 0])


def describe(grid: Tensor) -> str:
    """A grid as text, such as "1 x 16 x 24"."""
    return " x ".join(str(side) for side in grid.tolist())


@dataclass(frozen=True)
class VisionInputs(Movable):
    """All images and videos of a batch as the vision tower reads them: images first, then videos, patches in merge
    order.

    Attributes:
        pixel_values: [N, channels * temporal_patch * patch * patch] floating point.
        position_ids: [N, 2] int64, row and column of each patch in its frame.
        interpolation_index: [4, N] int64, the four position embeddings around each patch.
        interpolation_weight: [4, N] float32, their weights; each column sums to one.
        cu_seqlens: [F + 1] int32, offsets of the frames in patches. Attention does not cross a frame.
        lengths: the F frame lengths in patches, on the host.
    """

    pixel_values: Tensor
    position_ids: Tensor
    interpolation_index: Tensor
    interpolation_weight: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]

    def select(self, frames: Sequence[int]) -> Self:
        """Some of the frames (at least one), in the given order; pixels may be on a device, everything else is on the
        host.
        """
        starts = list(accumulate(self.lengths, initial=0))
        places = [slice(starts[frame], starts[frame + 1]) for frame in frames]
        lengths = tuple(self.lengths[frame] for frame in frames)
        offsets = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
        return type(self)(  # copying slices is about ten times as fast as indexing rows
            pixel_values=torch.cat([self.pixel_values[place] for place in places]),
            position_ids=torch.cat([self.position_ids[place] for place in places]),
            interpolation_index=torch.cat([self.interpolation_index[:, place] for place in places], 1),
            interpolation_weight=torch.cat([self.interpolation_weight[:, place] for place in places], 1),
            cu_seqlens=offsets,
            lengths=lengths,
        )


def frame_rows(lengths: Sequence[int], frames: Sequence[int]) -> Tensor:
    """The rows of some of the frames, for consecutive frames of these lengths."""
    starts = list(accumulate(lengths, initial=0))
    return torch.cat([torch.arange(starts[frame], starts[frame + 1]) for frame in frames])


def vision_slots(input_ids: Tensor, image_token_id: int, video_token_id: int, num_image_tokens: int) -> Tensor:
    """Row of the vision output for each token.

    Args:
        input_ids: integers of any shape, T in all.
        image_token_id: id of the placeholder token of images.
        video_token_id: id of the placeholder token of videos.
        num_image_tokens: rows of images in the vision output; those of videos follow.

    Returns:
        [T] int64, -1 for tokens that are not vision tokens.

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
    frames = _frames(_frame_positions, grids, merge)
    return torch.cat(frames) if frames else torch.zeros(0, 2, dtype=torch.int64)


def interpolation(grids: Tensor, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Bilinear interpolation of a square of position embeddings to the sizes of images and frames.

    Args:
        grids: [K, 3] int64.
        side: embeddings along a side of the square.
        merge: patches that become one token, along each side.

    Returns:
        [4, N] int64 rows of the embedding table around each patch (upper left, upper right, lower left, lower right)
        and [4, N] float32 their weights. Both are bit-identical to those of transformers.
    """
    frames = _frames(_frame_interpolation, grids, side, merge)
    if not frames:
        return torch.zeros(4, 0, dtype=torch.int64), torch.zeros(4, 0)
    index, weight = zip(*frames, strict=True)
    return torch.cat(index, dim=-1), torch.cat(weight, dim=-1)


def _frames[T](of_frame: Callable[..., T], grids: Tensor, *settings: int) -> list[T]:
    """[F] result of `of_frame` for the height and width of each frame. It may be shared: copy it, do not change it.

    Images have few different sizes, and a video's frames have one, so the result per size is cached, except for the
    largest, which bounds the memory: 512 frames of 4,096 patches take 128 MiB.
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

    Only `linspace` itself rounds as transformers does. Cached results must not depend on torch's current default dtype
    and device.
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
    """The vision tower's inputs, images first, then videos.

    Args:
        pixel_values: [patches of the images, features] floating point, or None without images.
        image_grid_thw: [images, 3] integers, or None.
        pixel_values_videos: [patches of the videos, features], or None without videos.
        video_grid_thw: [videos, 3] integers, or None.
        num_position_embeddings: size of the tower's embedding table, a square number.
        spatial_merge_size: patches that become one token, along each side.

    Returns:
        The inputs, or None if there are no images or videos.

    Raises:
        ValueError: grids that do not divide, a number of patches that differs from the grids', or a table size that is
            not a square.
    """
    side = isqrt(num_position_embeddings)
    if side * side != num_position_embeddings:
        raise ValueError(f"found {num_position_embeddings} position embeddings, expected a square number")
    images = check_grids("image", image_grid_thw, spatial_merge_size)
    videos = check_grids("video", video_grid_thw, spatial_merge_size)
    parts = [
        _check_pixels("image", pixel_values, images),
        _check_pixels("video", pixel_values_videos, videos),
    ]
    pixels = [part for part in parts if part is not None]
    if not pixels:
        return None
    grids = torch.cat((images, videos))
    lengths = frame_lengths(grids)
    index, weight = interpolation(grids, side, spatial_merge_size)
    return VisionInputs(
        pixel_values=torch.cat(pixels) if len(pixels) > 1 else pixels[0],
        position_ids=patch_positions(grids, spatial_merge_size),
        interpolation_index=index,
        interpolation_weight=weight,
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        lengths=tuple(lengths.tolist()),
    )


def _check_pixels(kind: str, pixels: Tensor | None, grids: Tensor) -> Tensor | None:
    """The pixels, if their number of patches is that of the grids; None if there are neither."""
    found, expected = 0 if pixels is None else len(pixels), int(grids.prod(-1).sum())
    if found != expected:
        raise ValueError(f"{kind} pixels: found {found} patches, expected {expected} for {len(grids)} {kind} grids")
    return pixels if expected else None
