"""Attention: self attention for both layer specs, and core attention without Transformer Engine."""

from qwen3vl_bridge.models.common.attention.context_parallel import ContextParallelAttention
from qwen3vl_bridge.models.common.attention.packed_rows import (
    HostPackedSeqParams,
    layout_packed_seq_params,
    packed_seq_params,
)
from qwen3vl_bridge.models.common.attention.segments import SegmentAttention
from qwen3vl_bridge.models.common.attention.self_attention import RotarySelfAttention

__all__ = [
    "ContextParallelAttention",
    "HostPackedSeqParams",
    "RotarySelfAttention",
    "SegmentAttention",
    "layout_packed_seq_params",
    "packed_seq_params",
]
