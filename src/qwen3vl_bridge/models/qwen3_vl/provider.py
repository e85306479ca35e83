"""The provider: the complete configuration of a Qwen3-VL model and its training, as one dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from qwen3vl_bridge.models.provider import ExpertsMixin, VisionLanguageProvider
from qwen3vl_bridge.models.qwen3_vl.config import FAMILY
from qwen3vl_bridge.models.qwen3_vl.refusals import FIXED, FIXED_WITH_EXPERTS, RULES
from qwen3vl_bridge.models.qwen3_vl.upstream_names import UpstreamExpertNames, UpstreamNames
from qwen3vl_bridge.models.settings.rules import Row, Rule

from transformers import Qwen3VLVisionConfig


@dataclass
class Qwen3VLModelProvider(UpstreamNames, VisionLanguageProvider):
    """A dense Qwen3-VL model, and the base of MoE models. Token ids and defaults are those of the released models.
    `VisionLanguageFields` documents the fields.
    """

    vision_config: Qwen3VLVisionConfig = field(default_factory=Qwen3VLVisionConfig)

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    bos_token_id: int = 151643
    eos_token_id: int = 151645

    qk_layernorm: bool = True
    rotary_base: float = 5_000_000.0
    mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])

    family: ClassVar[str] = FAMILY
    model_class: ClassVar[str] = "qwen3vl_bridge.models.qwen3_vl.model.Qwen3VLModel"
    language_model_class: ClassVar[str] = "qwen3vl_bridge.models.qwen3_vl.model.Qwen3VLGPTModel"
    encoder_class: ClassVar[str] = "qwen3vl_bridge.dist_train.modules.Qwen3VLEncoder"
    decoder_class: ClassVar[str] = "qwen3vl_bridge.dist_train.modules.Qwen3VLDecoder"
    fixed: ClassVar[Mapping[str, Row]] = FIXED
    rules: ClassVar[tuple[Rule, ...]] = RULES


@dataclass
class Qwen3VLMoEModelProvider(UpstreamExpertNames, ExpertsMixin, Qwen3VLModelProvider):
    """Provider of Qwen3-VL with experts (MoE): the differences from the dense model."""

    num_moe_experts: int | None = 128
    moe_router_topk: int = 8
    moe_ffn_hidden_size: int | None = 768
    moe_aux_loss_coeff: float | list[float] = 1e-3

    fixed: ClassVar[Mapping[str, Row]] = FIXED_WITH_EXPERTS
