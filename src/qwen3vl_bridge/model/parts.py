"""How much of each part of the model is trained.

What lives here: counting and logging it. What may not: which parameter belongs to which part (the package's
`parts.py`).
"""

from __future__ import annotations

import logging
from collections import Counter

from qwen3vl_bridge.parts import Part, part_of

from megatron.core.utils import unwrap_model
from torch import nn

logger = logging.getLogger(__name__)


def log_trained_parameters(model: list[nn.Module]) -> None:
    """Log how many parameters of each part this rank has, and how many of them are trained."""
    trained, total = Counter(), Counter()
    for chunk in unwrap_model(model):
        for name, parameter in chunk.named_parameters():
            total[part_of(name)] += parameter.numel()
            trained[part_of(name)] += parameter.numel() * parameter.requires_grad
    parts = ", ".join(f"{part.value} {trained[part]:,} of {total[part]:,}" for part in Part if total[part])
    logger.info("parameters trained on this rank: %s of %s (%s)", f"{trained.total():,}", f"{total.total():,}", parts)
