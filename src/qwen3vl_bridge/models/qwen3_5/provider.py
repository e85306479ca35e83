"""The Qwen3.5-VL providers: the configuration of a model and its training as a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from qwen3vl_bridge.models.common.hybrid_provider import HybridExpertsMixin, HybridModelProvider
from qwen3vl_bridge.models.qwen3_5.config import FAMILY_NAME
from qwen3vl_bridge.models.qwen3_5.model import Qwen35VLModel

from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig


@dataclass
class Qwen35VLModelProvider(HybridModelProvider):
    """Provider of the dense Qwen3.5-VL model, and base class of the MoE provider."""

    vision_config: Qwen3_5VisionConfig = field(default_factory=Qwen3_5VisionConfig)

    family: ClassVar[str] = FAMILY_NAME
    model_class = Qwen35VLModel


@dataclass
class Qwen35VLMoEModelProvider(HybridExpertsMixin, Qwen35VLModelProvider):
    """Provider of Qwen3.5-VL with experts (MoE)."""
