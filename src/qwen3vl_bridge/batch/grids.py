"""Grids of images and videos: (frames, height, width) in patches; an image has one frame.

What lives here: checking grids and cutting them into frames. What may not: tokens, pixels, positions.
Legend: K grids, F frames of all of them.
"""

from __future__ import annotations

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
