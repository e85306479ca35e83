"""Batches as plain tensors: tokens, images and videos, and their layout. Only torch; ranks are integers, no process
groups.
"""

from qwen3vl_bridge.batch.token_batch import ModelInputs, TokenBatch, VisionRankInputs, VisionRows
from qwen3vl_bridge.batch.token_layout import SequenceLayout, gathered_index, token_index
from qwen3vl_bridge.batch.vision_inputs import (
    VisionInputs,
    frame_lengths,
    interpolation,
    make_vision_inputs,
    mrope_positions,
    patch_positions,
    vision_slots,
)
from qwen3vl_bridge.batch.vision_sharding import VisionShard, VisionWork

__all__ = [
    "ModelInputs",
    "SequenceLayout",
    "TokenBatch",
    "VisionInputs",
    "VisionRankInputs",
    "VisionRows",
    "VisionShard",
    "VisionWork",
    "frame_lengths",
    "gathered_index",
    "interpolation",
    "make_vision_inputs",
    "mrope_positions",
    "patch_positions",
    "token_index",
    "vision_slots",
]
