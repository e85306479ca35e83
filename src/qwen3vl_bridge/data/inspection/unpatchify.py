"""From a processor's patches back to the picture that they were cut from.

What lives here: the way back from `pixel_values`, for people to look at. What may not: the way there (the processor's).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def unpatched(patches: Tensor, grid: tuple[int, int, int], processor: Any) -> Tensor:
    """The frames that a picture's patches were cut from, as a processor resized them.

    Args:
        patches: [N, channels * temporal_patch * patch * patch], those that merge into one token side by side.
        grid: patches in time, height and width; N in all.
        processor: the image or video processor that made them.

    Returns:
        [frames, height, width, channels] uint8. An image has as many equal frames as a patch is long in time.
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
