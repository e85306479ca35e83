"""Tokens, pictures and where they lie, as plain tensors: torch only, no process groups, ranks are integers."""

from .batch import ModelInputs, PackedBatch, VisionRows
from .grids import frame_lengths
from .layout import SequenceLayout, gathered_index, token_index
from .parcels import EncoderInputs, Parcel
from .pictures import VisionInputs
from .positions import mrope_positions
from .sharing import VisionWork
from .vision import interpolation, make_vision_inputs, patch_positions, vision_slots

__all__ = [
    "EncoderInputs",
    "ModelInputs",
    "PackedBatch",
    "Parcel",
    "SequenceLayout",
    "VisionInputs",
    "VisionRows",
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
