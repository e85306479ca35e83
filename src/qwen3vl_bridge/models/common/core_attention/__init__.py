"""Core attention without Transformer Engine: by segments of padded and packed rows, and over context-parallel ranks."""

from qwen3vl_bridge.models.common.core_attention.context_parallel import ContextParallelAttention
from qwen3vl_bridge.models.common.core_attention.segments import SegmentAttention

__all__ = ["ContextParallelAttention", "SegmentAttention"]
