"""The Megatron Qwen3.5-VL model."""

from __future__ import annotations

from qwen3vl_bridge.models.common.hybrid_model import HybridModel


class Qwen35VLModel(HybridModel):
    """One pipeline stage of Qwen3.5-VL: the vision tower on the first stage, text layers on all stages."""
