"""What the vision tower needs to know about the pictures of a batch, made on the host from their grids.

What lives here: slots of vision tokens, places of patches, position-embedding interpolation, `make_vision_inputs`.
What may not: reading or resizing pictures (`data/`), the tower itself (`model/`), Megatron.

Patches come in merge order: the merge x merge patches that become one token lie together.
Legend: K grids, F frames, N patches, M = N / merge^2 vision tokens, T tokens.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

from .batch import VisionInputs
from .grids import check_grids, frame_lengths


def vision_slots(input_ids: Tensor, image_token_id: int, video_token_id: int, num_image_tokens: int) -> Tensor:
    """Which row of the vision output each token takes.

    Args:
        input_ids: integers of any shape, T in all.
        image_token_id: id of the token that stands for a piece of an image.
        video_token_id: id of the token that stands for a piece of a video.
        num_image_tokens: rows that images take in the vision output; those of videos follow.

    Returns:
        [T] int64, -1 for tokens that are not vision.

    Raises:
        ValueError: if the image tokens are not `num_image_tokens`.
    """
    ids = input_ids.reshape(-1)
    image, video = ids == image_token_id, ids == video_token_id
    rank = image.cumsum(0)
    if int(rank[-1]) != num_image_tokens:
        raise ValueError(f"found {int(rank[-1])} image tokens, expected {num_image_tokens} for the images")
    slots = torch.where(image, rank - 1, -1)
    return torch.where(video, video.cumsum(0) - 1 + num_image_tokens, slots)


def patch_positions(grids: Tensor, merge: int) -> Tensor:
    """[N, 2] int64, row and column of each patch in its frame, in merge order, for grids [K, 3]."""
    width = grids[:, 2].repeat_interleave(grids[:, 0])
    lengths = frame_lengths(grids)
    ends = lengths.cumsum(0)
    total = int(lengths.sum())
    starts, tokens_a_row = (
        values.repeat_interleave(lengths, output_size=total) for values in (ends - lengths, width // merge)
    )
    place = torch.arange(total) - starts
    token, inner = place // merge**2, place % merge**2
    row = token // tokens_a_row * merge + inner // merge
    column = token % tokens_a_row * merge + inner % merge
    return torch.stack((row, column), dim=-1)


def interpolation(grids: Tensor, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Bilinear interpolation of a square of position embeddings to pictures of other sizes.

    Args:
        grids: [K, 3] int64.
        side: embeddings along a side of the square.
        merge: patches that become one token, along each side.

    Returns:
        [4, N] int64 rows of the embedding table around each patch (upper left, upper right, lower left, lower right)
        and [4, N] float32 their weights. Both as transformers has them, to the bit.
    """
    sizes, which = grids[:, 1:].unique(return_inverse=True)
    axes = [_axis(int(size), side) for size in sizes.tolist()]
    low, fraction = (torch.cat(parts) for parts in zip(*axes, strict=True)) if axes else (torch.zeros(0),) * 2
    starts = (sizes.cumsum(0) - sizes)[which].repeat_interleave(grids[:, 0], dim=0)
    lengths = frame_lengths(grids)
    entry = patch_positions(grids, merge) + starts.repeat_interleave(lengths, dim=0)
    (top, left), (down, right) = (
        low.long()[entry].unbind(-1),
        fraction[entry].unbind(-1),
    )
    bottom, far = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
    index = torch.stack((top * side + left, top * side + far, bottom * side + left, bottom * side + far))
    up, near = 1 - down, 1 - right
    return index, torch.stack((up * near, up * right, down * near, down * right))


@lru_cache(maxsize=4096)
def _axis(size: int, side: int) -> tuple[Tensor, Tensor]:
    """[size] the embedding at or before each patch of an axis, and how far beyond it the patch lies.

    Pictures come in few sizes, so this is worth keeping; and only `linspace` itself rounds as transformers does.
    """
    place = torch.linspace(0, side - 1, size)
    low = place.int()
    return low, place - low


def make_vision_inputs(
    pixel_values: Tensor | None,
    image_grid_thw: Tensor | None,
    pixel_values_videos: Tensor | None,
    video_grid_thw: Tensor | None,
    *,
    num_position_embeddings: int,
    spatial_merge_size: int,
) -> VisionInputs | None:
    """All that the vision tower reads, images first, then videos.

    Args:
        pixel_values: [patches of the images, features] floating point, or None without images.
        image_grid_thw: [images, 3] integers, or None.
        pixel_values_videos: [patches of the videos, features], or None without videos.
        video_grid_thw: [videos, 3] integers, or None.
        num_position_embeddings: size of the tower's embedding table, a square number.
        spatial_merge_size: patches that become one token, along each side.

    Returns:
        The inputs, or None where there are no pictures.

    Raises:
        ValueError: on grids that don't divide, pixels that are not as many as the grids say, or a table that is no
            square.
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
    """The pixels if they are as many as the grids say; None where there are neither."""
    found, expected = 0 if pixels is None else len(pixels), int(grids.prod(-1).sum())
    if found != expected:
        raise ValueError(f"{kind} pixels: found {found} patches, expected {expected} for {len(grids)} {kind} grids")
    return pixels if expected else None
