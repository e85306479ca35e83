"""What a separate vision rank encodes (dist-train), and for which language replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from qwen3vl_bridge.batch.device_transfer import Movable
from qwen3vl_bridge.batch.encoder_shards import EncoderShard
from qwen3vl_bridge.batch.packed_batch import PackedBatch
from qwen3vl_bridge.batch.vision_inputs import VisionInputs
from qwen3vl_bridge.batch.vision_sharding import VisionWork, assign_vision

import torch


@dataclass(frozen=True)
class EncoderInputs(Movable):
    """What one vision rank encodes, and for which receivers.

    Attributes:
        vision: its images and videos, ordered by receiver; None if it has none.
        shards: the shard of each receiver.
        rows: largest number of vision tokens in a shard for the same receivers; shards are padded to it.
    """

    vision: VisionInputs | None
    shards: tuple[EncoderShard, ...]
    rows: int

    @classmethod
    def of(cls, batches: Sequence[PackedBatch], work: VisionWork, encoders: int, share: int) -> EncoderInputs:
        """A rank's part of the microbatches that it encodes at a time.

        Args:
            batches: of one language replica, whose images several ranks may divide, or of several replicas.
            work: cost of frames.
            encoders: number of ranks that divide the images of each batch.
            share: index of this rank's part.
        """
        assignments = [assign_vision(batch.vision, work, encoders) for batch in batches]
        sent = [batch.encoder_shards_of(assignment) for batch, assignment in zip(batches, assignments, strict=True)]
        parts = [assignment.part(batch.vision, share) for batch, assignment in zip(batches, assignments, strict=True)]
        return cls(
            vision=_joined([part for part in parts if part is not None]),
            shards=tuple(shards[share] for shards in sent),
            rows=max(shard.tokens for shards in sent for shard in shards),
        )


def _joined(pictures: Sequence[VisionInputs]) -> VisionInputs | None:
    if len(pictures) < 2:
        return pictures[0] if pictures else None
    lengths = tuple(length for one in pictures for length in one.lengths)
    return VisionInputs(
        pixel_values=torch.cat([one.pixel_values for one in pictures]),
        position_ids=torch.cat([one.position_ids for one in pictures]),
        interpolation_index=torch.cat([one.interpolation_index for one in pictures], 1),
        interpolation_weight=torch.cat([one.interpolation_weight for one in pictures], 1),
        cu_seqlens=torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32),
        lengths=lengths,
    )
