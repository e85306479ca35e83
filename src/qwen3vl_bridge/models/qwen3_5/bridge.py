"""The Qwen3.5-VL bridges, registered with Megatron-Bridge: from a Hugging Face configuration to our provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.config.hf_config import rope_provider_fields
from qwen3vl_bridge.models.common.bridge import FamilyBridge, provider_by_model_type, stored_config
from qwen3vl_bridge.models.common.provider import ExpertsMixin, register_replacement
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

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.qwen_vl import qwen35_vl_provider as stock
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

# In our provider `transformer_impl` selects the layers, and `deterministic_mode` would select kernels.
_EXCLUDED = ("transformer_layer_spec", "deterministic_mode")


def _saved_ffn_size(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"ffn_hidden_size": saved width of an expert}, or an empty dict if no width is saved."""
    width = saved.get("moe_ffn_hidden_size")
    return {} if width is None else {"ffn_hidden_size": width}


register_replacement(stock.Qwen35VLModelProvider, Qwen35VLModelProvider, exclude=_EXCLUDED)
register_replacement(
    stock.Qwen35VLMoEModelProvider, Qwen35VLMoEModelProvider, exclude=_EXCLUDED, convert=_saved_ffn_size
)


@MegatronModelBridge.register_bridge(
    source=Qwen3_5ForConditionalGeneration, target=Qwen35VLModel, provider=Qwen35VLModelProvider, model_type="qwen3_5"
)
class Qwen35VLBridge(FamilyBridge):
    """AutoBridge support for dense Qwen3.5-VL."""

    family = FAMILY_NAME

    def provider_fields(self, config: Any) -> dict[str, Any]:
        """Return the provider's fields from a Hugging Face configuration."""
        text = config.text_config
        fields = super().provider_fields(config) | rope_provider_fields(rope_parameters(text.to_dict()))
        fields |= {name: getattr(text, name) for name in LINEAR_SIZES}
        fields["linear_attention_freq"] = [int(kind == LINEAR) for kind in layer_types_of(text.to_dict())]
        if issubclass(self.PROVIDER_CLASS, ExpertsMixin):
            fields["ffn_hidden_size"] = text.moe_intermediate_size
            fields["moe_shared_expert_intermediate_size"] = text.shared_expert_intermediate_size
        else:
            fields["ffn_hidden_size"] = text.intermediate_size
        return fields

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return the provider, without multi-token prediction if the checkpoint has no weights for it."""
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
    """Return a provider for a `config.json`, see `provider_by_model_type`.

    The `run_config.yaml` of a converted checkpoint contains the name and the arguments of this function.
    """
    return provider_by_model_type((Qwen35VLBridge, Qwen35VLMoEBridge), hf_config, settings)
