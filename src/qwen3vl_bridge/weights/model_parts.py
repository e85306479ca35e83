"""The parts of the model that can be frozen, adapted and counted one by one.

Standard library only.
"""

from __future__ import annotations

from enum import Enum


class Part(Enum):
    """As in the names of the freeze flags."""

    LANGUAGE_MODEL = "language_model"
    VISION_MODEL = "vision_model"  # without the mergers
    VISION_PROJECTION = "vision_projection"  # the mergers, main and DeepStack


def part_of(name: str) -> Part:
    """The part of a model's parameter or module, by its name in the model."""
    if name.startswith("language_model."):
        return Part.LANGUAGE_MODEL
    is_merger = name.startswith(("vision_model.merger.", "vision_model.decoder.deepstack_merger_list."))
    return Part.VISION_PROJECTION if is_merger else Part.VISION_MODEL


def part_of_wrapped(name: str) -> Part:
    """The part of a parameter, by its name in the model or in a wrapper.

    Raises:
        ValueError: a name that is not of this model.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if not name.startswith(("language_model.", "vision_model.")):
        raise ValueError(f"found the parameter {name}, expected one of language_model or vision_model")
    return part_of(name)
