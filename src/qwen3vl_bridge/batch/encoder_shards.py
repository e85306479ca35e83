"""What ranks of the vision tower encode for language ranks, where both have ranks of their own.

What lives here: which pictures a rank encodes, and how both sides name what is sent. What may not: who serves whom
(`parallel/encoder_replicas.py`), the tensor that is sent (`encoder_parallel/payload.py`), process groups.

Both sides read the same batches and work out the same shards, so nothing needs to be agreed on; what is sent says what
it is all the same, and the receiver compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from qwen3vl_bridge.batch.device_transfer import Movable
from qwen3vl_bridge.batch.vision_inputs import VisionInputs
from qwen3vl_bridge.batch.vision_sharding import VisionAssignment, VisionWork, assign_vision

import torch

if TYPE_CHECKING:
    from qwen3vl_bridge.batch.packed_batch import PackedBatch


@dataclass(frozen=True)
class EncoderShard:
    """What one rank of the tower sends to one language replica for a microbatch.

    Attributes:
        tokens: vision tokens; 0 where the microbatch has no pictures for this rank.
        mark: 32 bits of a checksum of the samples, their tokens and the frames that were encoded.
    """

    tokens: int
    mark: int


def encoder_shards_of(batch: PackedBatch, assignment: VisionAssignment) -> tuple[EncoderShard, ...]:
    """What each of the tower's ranks sends for a microbatch.

    Args:
        batch: the microbatch.
        assignment: of its pictures to them.
    """
    samples = zlib.crc32(repr((batch.sample_ids, batch.layout.lengths)).encode())
    samples = zlib.crc32(batch.input_ids.numpy(), samples)  # they may have no names
    lengths = () if batch.vision is None else batch.vision.lengths
    return tuple(
        EncoderShard(tokens, zlib.crc32(repr([lengths[frame] for frame in frames]).encode(), samples))
        for frames, tokens in zip(assignment.frames, assignment.counts, strict=True)
    )


@dataclass(frozen=True)
class EncoderInputs(Movable):
    """What one rank of the tower encodes, and for whom.

    Attributes:
        vision: its pictures, those of one receiver after the other's; None where there are none.
        shards: what each receiver is sent.
        rows: the most vision tokens in a shard of any rank that sends to the same receivers; shards are made as long.
    """

    vision: VisionInputs | None
    shards: tuple[EncoderShard, ...]
    rows: int

    @classmethod
    def of(cls, batches: Sequence[PackedBatch], work: VisionWork, encoders: int, share: int) -> EncoderInputs:
        """A rank's part of the microbatches that it serves at a time.

        Args:
            batches: of one language replica, whose pictures several ranks may share, or of several replicas.
            work: what frames cost.
            encoders: how many ranks share the pictures of each.
            share: which of the shares is this rank's.
        """
        assignments = [assign_vision(batch.vision, work, encoders) for batch in batches]
        sent = [encoder_shards_of(batch, assignment) for batch, assignment in zip(batches, assignments, strict=True)]
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
