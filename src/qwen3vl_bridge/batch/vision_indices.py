"""Indices and weights that the vision tower needs for the images and videos of a batch, computed on the host from
grids.

What lives here: slots of vision tokens, positions of patches, position-embedding interpolation, `make_vision_inputs`.
What may not: reading or resizing images (`data/`), the tower itself (`models/`), Megatron.

Patches are in merge order: the merge x merge patches that become one token are consecutive.
Legend: K grids, F frames, N patches, M = N / merge^2 vision tokens, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import unwrap
from math import isqrt

from qwen3vl_bridge.batch.grids import check_grids, frame_lengths
from qwen3vl_bridge.batch.vision_inputs import VisionInputs

import torch
from torch import Tensor


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
