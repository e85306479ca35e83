"""AutoBridge support that families of hybrid models share."""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.config.hf_config import rope_provider_fields
from qwen3vl_bridge.config.hybrid_config import LINEAR, LINEAR_SIZES, MTP_LAYERS, layer_types_of, rope_parameters
from qwen3vl_bridge.models.common.bridge import FamilyBridge, stored_config
from qwen3vl_bridge.models.common.provider import ExpertsMixin


class HybridBridge(FamilyBridge):
    """Base class of the bridge of a family of hybrid models. A subclass sets `family`, and is registered."""

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
        provider.mtp_num_layers = stored_config(self.family, hf_pretrained)["text_config"].get(MTP_LAYERS) or None
        return provider
