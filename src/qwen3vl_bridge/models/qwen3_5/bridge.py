"""The bridge: converts a Hugging Face configuration to our provider, and is registered with Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.bridge import FamilyBridge, provider_by_model_type, scaled_rope, stored_config
from qwen3vl_bridge.models.provider import ExpertsMixin
from qwen3vl_bridge.models.qwen3_5.config import (
    FAMILY_NAME,
    LINEAR,
    LINEAR_SIZES,
    MTP_LAYERS,
    layer_types_of,
    rope_parameters,
)
from qwen3vl_bridge.models.qwen3_5.model import Qwen35VLModel
from qwen3vl_bridge.models.qwen3_5.provider import Qwen35VLModelProvider, Qwen35VLMoEModelProvider
from qwen3vl_bridge.models.saved_providers import register_replacement

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.qwen_vl import qwen35_vl_provider as stock
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

# Here `transformer_impl` selects the layers; determinism is a choice of linear attention's kernel.
_EXCLUDED = ("transformer_layer_spec", "deterministic_mode")


def _mlp_width(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Which Megatron-Bridge leaves at megatron-core's default where each layer has experts, and no MLP is as wide."""
    width = saved.get("moe_ffn_hidden_size")
    return {} if width is None else {"ffn_hidden_size": width}


register_replacement(stock.Qwen35VLModelProvider, Qwen35VLModelProvider, exclude=_EXCLUDED)
register_replacement(stock.Qwen35VLMoEModelProvider, Qwen35VLMoEModelProvider, exclude=_EXCLUDED, elsewhere=_mlp_width)


@MegatronModelBridge.register_bridge(
    source=Qwen3_5ForConditionalGeneration, target=Qwen35VLModel, provider=Qwen35VLModelProvider, model_type="qwen3_5"
)
class Qwen35VLBridge(FamilyBridge):
    """AutoBridge support for dense Qwen3.5-VL."""

    family = FAMILY_NAME

    def provider_fields(self, config: Any) -> dict[str, Any]:
        """See FamilyBridge."""
        text = config.text_config
        rope = rope_parameters(text.to_dict())
        fields = dict(
            rotary_base=rope["rope_theta"],
            rotary_percent=rope["partial_rotary_factor"],
            mrope_section=rope["mrope_section"],
            rope_parameters=scaled_rope(rope),
            linear_attention_freq=[int(kind == LINEAR) for kind in layer_types_of(text.to_dict())],
            **{name: getattr(text, name) for name in LINEAR_SIZES},
        )
        if issubclass(self.PROVIDER_CLASS, ExpertsMixin):
            fields["ffn_hidden_size"] = text.moe_intermediate_size
            fields["moe_shared_expert_intermediate_size"] = text.shared_expert_intermediate_size
        else:
            fields["ffn_hidden_size"] = text.intermediate_size
        return super().provider_fields(config) | fields

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Like FamilyBridge's; without multi-token prediction if transformers has saved the model, which drops it."""
        provider = super().provider_bridge(hf_pretrained)
        provider.mtp_num_layers = stored_config(FAMILY_NAME, hf_pretrained)["text_config"].get(MTP_LAYERS) or None
        return provider


@MegatronModelBridge.register_bridge(
    source=Qwen3_5MoeForConditionalGeneration,
    target=Qwen35VLModel,
    provider=Qwen35VLMoEModelProvider,
    model_type="qwen3_5_moe",
)
class Qwen35VLMoEBridge(Qwen35VLBridge):
    """AutoBridge support for Qwen3.5-VL with experts (MoE)."""


def provider_from_hf_config(hf_config: Mapping[str, Any], **settings: Any) -> Qwen35VLModelProvider:
    """See `provider_by_model_type`. The `run_config.yaml` of a converted checkpoint contains its name and arguments."""
    return provider_by_model_type((Qwen35VLBridge, Qwen35VLMoEBridge), hf_config, settings)
