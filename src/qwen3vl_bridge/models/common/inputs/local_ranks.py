"""This rank's position among the ranks that share a batch, which determines its tokens, images and videos.

What lives here: the one function that reads it from a provider and its process groups. What may not: the selection
itself (`PackedBatch.local`), collectives.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.common.settings.encoder_parallel import replicas_of
from qwen3vl_bridge.models.common.vision_config import vision_work

from megatron.core.process_groups_config import ProcessGroupCollection


def sequence_ranks(config: VisionLanguageProvider, groups: ProcessGroupCollection) -> dict[str, Any]:
    """The arguments of `PackedBatch.local` that select this rank's tokens, images and videos."""
    return dict(
        vision_work=vision_work(config),
        encoders=None if config.add_encoder else replicas_of(config).encoders,
        cp_size=groups.cp.size(),
        cp_rank=groups.cp.rank(),
        sp_size=groups.tp.size() if config.sequence_parallel else 1,
        sp_rank=groups.tp.rank() if config.sequence_parallel else 0,
        predicts=config.trains_mtp,
    )
