"""What separate vision ranks send for a microbatch (dist-train), and how both sides identify it.

Both sides read the same batches and compute the same shards, so no negotiation is needed; nevertheless each payload has
a header that the receiver checks.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from qwen3vl_bridge.batch.vision_inputs import VisionInputs
from qwen3vl_bridge.batch.vision_sharding import VisionAssignment


@dataclass(frozen=True)
class EncoderShard:
    """What one vision rank sends to one language replica for a microbatch.

    Attributes:
        tokens: number of vision tokens; 0 if the microbatch has no frames for this rank.
        mark: 32-bit checksum of the samples, their tokens and the encoded frames.
    """

    tokens: int
    mark: int


def shards_of(vision: VisionInputs | None, assignment: VisionAssignment, samples: int) -> tuple[EncoderShard, ...]:
    """The shard of each vision rank for a microbatch.

    Args:
        vision: images and videos of the microbatch; None if it has none.
        assignment: of its frames to the vision ranks.
        samples: checksum of its samples and their tokens.
    """
    lengths = () if vision is None else vision.lengths
    return tuple(
        EncoderShard(tokens, zlib.crc32(repr([lengths[frame] for frame in frames]).encode(), samples))
        for frames, tokens in zip(assignment.frames, assignment.counts, strict=True)
    )
