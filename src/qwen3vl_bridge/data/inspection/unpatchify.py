"""Reconstructs an image from a processor's patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def unpatched(patches: Tensor, grid: tuple[int, int, int], processor: Any) -> Tensor:
    """The frames from which patches were cut, as resized by a processor.

    Args:
        patches: [N, channels * temporal_patch * patch * patch], in merge order.
        grid: patches in time, height and width; N in all.
        processor: the image or video processor that made them.

    Returns:
        [frames, height, width, channels] uint8. An image has as many equal frames as the temporal patch size.
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
