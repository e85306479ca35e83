"""Which parts of the model are trained."""

from __future__ import annotations

import logging
from collections import Counter

from qwen3vl_bridge.weights.model_parts import Part, part_of, part_of_wrapped

from megatron.core.utils import unwrap_model
from torch import nn

logger = logging.getLogger(__name__)


def freeze_parts(
    model: nn.Module,
    *,
    freeze_language_model: bool = False,
    freeze_vision_model: bool = False,
    freeze_vision_projection: bool = False,
) -> None:
    """Stop training of whole parts. The vision projection is the mergers; the vision model is the rest of the tower."""
    frozen = {
        Part.LANGUAGE_MODEL: freeze_language_model,
        Part.VISION_MODEL: freeze_vision_model,
        Part.VISION_PROJECTION: freeze_vision_projection,
    }
    for name, parameter in model.named_parameters():
        if frozen[part_of(name)]:
            parameter.requires_grad = False


def log_trained_parameters(model: list[nn.Module]) -> None:
    """Log how many parameters of each part this rank has, and how many of them are trained."""
    trained, total = Counter(), Counter()
    for chunk in unwrap_model(model):
        for name, parameter in chunk.named_parameters():
            part = part_of_wrapped(name)  # still wrapped by Megatron-FSDP
            total[part] += parameter.numel()
            trained[part] += parameter.numel() * parameter.requires_grad
    parts = ", ".join(f"{part.value} {trained[part]:,} of {total[part]:,}" for part in Part if total[part])
    logger.info("parameters trained on this rank: %s of %s (%s)", f"{trained.total():,}", f"{total.total():,}", parts)
