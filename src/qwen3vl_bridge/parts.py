"""The parts of the model that can be frozen and adapted one by one.

What lives here: which parameter belongs to which part. Standard library only. What may not: deciding what is trained
(`Qwen3VLModel.freeze`, `peft.py`).
"""

from enum import Enum


class Part(Enum):
    """As in the names of the freeze flags."""

    LANGUAGE_MODEL = "language_model"
    VISION_MODEL = "vision_model"  # without the mergers
    VISION_PROJECTION = "vision_projection"  # the mergers, main and DeepStack


def part_of(name: str) -> Part:
    """The part of a Qwen3VLModel's parameter or module, by its name in the model."""
    if name.startswith("language_model."):
        return Part.LANGUAGE_MODEL
    is_merger = name.startswith(("vision_model.merger.", "vision_model.decoder.deepstack_merger_list."))
    return Part.VISION_PROJECTION if is_merger else Part.VISION_MODEL
