"""Vision inputs of a batch.

What lives here: what the vision tower reads. What may not: computing it from grids (`vision_indices.py`), assigning it
to ranks (`vision_sharding.py`), the tower.

Legend: N patches, F frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from qwen3vl_bridge.batch.device_transfer import Movable

import torch
from torch import Tensor


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
