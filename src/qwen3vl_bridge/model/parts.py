"""The parts of the model that can be frozen and adapted one by one.

What lives here: which parameter belongs to which part, and how much of each is trained. What may not: deciding that
(`Qwen3VLModel.freeze`, `peft.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import Enum

from megatron.core.utils import unwrap_model
from torch import nn

logger = logging.getLogger(__name__)


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


def part_of_wrapped(name: str) -> Part:
    """The part of a parameter, by its name in a Qwen3VLModel or in what wraps one.

    Raises:
        ValueError: it is of another model.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if not name.startswith(("language_model.", "vision_model.")):
        raise ValueError(f"found the parameter {name}, expected one of language_model or vision_model")
    return part_of(name)


def log_trained_parameters(model: list[nn.Module]) -> None:
    """Log how many parameters of each part this rank has, and how many of them are trained."""
    trained, total = Counter(), Counter()
    for chunk in unwrap_model(model):
        for name, parameter in chunk.named_parameters():
            part = part_of_wrapped(name)  # Megatron-FSDP is still around it
            total[part] += parameter.numel()
            trained[part] += parameter.numel() * parameter.requires_grad
    parts = ", ".join(f"{part.value} {trained[part]:,} of {total[part]:,}" for part in Part if total[part])
    logger.info("parameters trained on this rank: %s of %s (%s)", f"{trained.total():,}", f"{total.total():,}", parts)
