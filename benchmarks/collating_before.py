"""Collating as it was before its indices were made faster, to compare with: the same batches, to the bit.

What lives here: positions of tokens by a sum over runs, positions of patches and interpolation computed for each patch,
pixels joined before they are cast. What may not: measuring (`measuring.py`), what training uses (`batch/`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from qwen3vl_bridge.batch import SequenceLayout, frame_lengths, vision_inputs
from qwen3vl_bridge.batch.vision_inputs import check_grids, frames
from qwen3vl_bridge.data import collation

import torch
from torch import Tensor


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
    """As `batch.mrope_positions`, without its checks of runs."""
    ids, padding = input_ids.reshape(-1), layout.padding_mask()
    within = torch.zeros(3, layout.total, dtype=torch.int64)
    advance = torch.ones(layout.total, dtype=torch.int64)
    merge = torch.tensor([1, spatial_merge_size, spatial_merge_size])
    images = check_grids("image", image_grid_thw, spatial_merge_size)
    videos = frames(check_grids("video", video_grid_thw, spatial_merge_size))
    for token_id, grids in ((image_token_id, images), (video_token_id, videos)):
        tokens = (ids == token_id).nonzero().squeeze(-1)
        if not len(tokens):
            continue
        sides = grids // merge
        within[:, tokens] = _places(sides)
        # A run moves the count on at its last token, so that all of its tokens read the count it began with.
        advance[tokens] = 0
        advance[tokens[sides.prod(-1).cumsum(0) - 1]] = sides[:, 1:].amax(-1)
    count = advance.cumsum(0) - advance
    count -= layout.per_token(count[layout.cu_seqlens_padded[:-1].long()])
    return (count + within).masked_fill(padding, 0).view(3, *input_ids.shape)


def _places(sides: Tensor) -> Tensor:
    """[3, M] frame, row and column of each token, of runs with `sides` [K, 3] in tokens."""
    lengths = sides.prod(-1)
    ends = lengths.cumsum(0)
    starts, height, width = (values.repeat_interleave(lengths) for values in (ends - lengths, sides[:, 1], sides[:, 2]))
    place = torch.arange(int(ends[-1])) - starts
    row = place // width
    return torch.stack((row // height, row % height, place % width))


def patch_positions(grids: Tensor, merge: int) -> Tensor:
    """As `batch.patch_positions`."""
    lengths = frame_lengths(grids)
    width = grids[:, 2].repeat_interleave(grids[:, 0])
    ends = lengths.cumsum(0)
    starts, tokens_a_row = (values.repeat_interleave(lengths) for values in (ends - lengths, width // merge))
    place = torch.arange(int(lengths.sum())) - starts
    token, inner = place // merge**2, place % merge**2
    row = token // tokens_a_row * merge + inner // merge
    return torch.stack((row, token % tokens_a_row * merge + inner % merge), dim=-1)


def interpolation(grids: Tensor, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """As `batch.interpolation`."""
    sizes, which = grids[:, 1:].unique(return_inverse=True)
    low, fraction = (torch.cat(parts) for parts in zip(*(_axis(size, side) for size in sizes.tolist()), strict=True))
    starts = (sizes.cumsum(0) - sizes)[which].repeat_interleave(grids[:, 0], dim=0)
    entry = patch_positions(grids, merge) + starts.repeat_interleave(frame_lengths(grids), dim=0)
    (top, left), (down, right) = low.long()[entry].unbind(-1), fraction[entry].unbind(-1)
    bottom, far = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
    index = torch.stack((top * side + left, top * side + far, bottom * side + left, bottom * side + far))
    up, near = 1 - down, 1 - right
    return index, torch.stack((up * near, up * right, down * near, down * right))


@lru_cache(maxsize=4096)
def _axis(size: int, side: int) -> tuple[Tensor, Tensor]:
    """[size] the embedding at or before each patch of an axis, and how far beyond it the patch lies."""
    place = torch.linspace(0, side - 1, size)
    low = place.int()
    return low, place - low


def _pictures(self: collation.Collator, samples: Any, grids: str, pixels: str) -> tuple[Tensor | None, ...]:
    """As the collator's own."""
    some = [sample for sample in samples if getattr(sample, grids) is not None]
    if not some:
        return None, None
    whole = torch.cat([getattr(sample, pixels) for sample in some]).to(self.pixel_dtype)
    return torch.cat([getattr(sample, grids) for sample in some]), whole


@contextmanager
def as_before() -> Iterator[None]:
    """Collating as it was."""
    replaced = (
        (collation, "mrope_positions", mrope_positions),
        (vision_inputs, "patch_positions", patch_positions),
        (vision_inputs, "interpolation", interpolation),
        (collation.Collator, "_pictures", _pictures),
    )
    now = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(replaced, now, strict=True):
            setattr(owner, name, function)
