"""The bridge: a Hugging Face configuration becomes our provider; registration with Megatron-Bridge.

What lives here: the translation. What may not: parameter names (`table.py`), defaults (`provider.py`), what is refused
(`config_checks.py`), what all families' bridges do (`models/common/bridge.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.common.bridge import FamilyBridge, provider_of
from qwen3vl_bridge.models.qwen3_5.config_checks import check_settings, rope_parameters
from qwen3vl_bridge.models.qwen3_5.config_dimensions import FAMILY, LINEAR, layer_types_of
from qwen3vl_bridge.models.qwen3_5.model import Qwen35VLModel
from qwen3vl_bridge.models.qwen3_5.provider import Qwen35VLModelProvider, Qwen35VLMoEModelProvider

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration


@MegatronModelBridge.register_bridge(
    source=Qwen3_5ForConditionalGeneration,
    target=Qwen35VLModel,
    provider=Qwen35VLModelProvider,
    model_type="qwen3_5",
)
class Qwen35VLBridge(FamilyBridge):
    """Dense Qwen3.5-VL for AutoBridge."""

    family = FAMILY
    provider_class = Qwen35VLModelProvider

    def provider_bridge(self, hf_pretrained: Any) -> Qwen35VLModelProvider:
        """The provider of a Hugging Face model.

        Args:
            hf_pretrained: anything with a `config`, a Qwen3_5Config or Qwen3_5MoeConfig.

        Raises:
            ValueError: a setting this model does not honour.
        """
        return self.provider_class(**self.provider_fields(hf_pretrained.config))

    def provider_fields(self, config: Any) -> dict[str, Any]:
        """The provider's fields that a Hugging Face configuration decides."""
        check_settings(config.to_dict())
        text = config.text_config
        rope = rope_parameters(text.to_dict())
        return dict(
            **self.shared_fields(config),
            **self.mlp_fields(text),
            rotary_base=rope["rope_theta"],
            rotary_percent=rope["partial_rotary_factor"],
            mrope_section=list(rope["mrope_section"]),
            linear_attention_freq=[int(kind == LINEAR) for kind in layer_types_of(text.to_dict())],
            linear_conv_kernel_dim=text.linear_conv_kernel_dim,
            linear_key_head_dim=text.linear_key_head_dim,
            linear_value_head_dim=text.linear_value_head_dim,
            linear_num_key_heads=text.linear_num_key_heads,
            linear_num_value_heads=text.linear_num_value_heads,
        )

    def mlp_fields(self, text: Any) -> dict[str, Any]:
        """Those of its MLPs."""
        return dict(ffn_hidden_size=text.intermediate_size)


@MegatronModelBridge.register_bridge(
    source=Qwen3_5MoeForConditionalGeneration,
    target=Qwen35VLModel,
    provider=Qwen35VLMoEModelProvider,
    model_type="qwen3_5_moe",
)
class Qwen35VLMoEBridge(Qwen35VLBridge):
    """Qwen3.5-VL with experts for AutoBridge."""

    provider_class = Qwen35VLMoEModelProvider

    def mlp_fields(self, text: Any) -> dict[str, Any]:
        """Those of its experts."""
        return dict(
            ffn_hidden_size=text.moe_intermediate_size,
            num_moe_experts=text.num_experts,
            moe_router_topk=text.num_experts_per_tok,
            moe_ffn_hidden_size=text.moe_intermediate_size,
            moe_shared_expert_intermediate_size=text.shared_expert_intermediate_size,
            moe_aux_loss_coeff=text.router_aux_loss_coef,
        )


def provider_from_hf_config(hf_config: Mapping[str, Any], **settings: Any) -> Qwen35VLModelProvider:
    """The provider of a `config.json`. The `run_config.yaml` of a converted checkpoint names this function.

    Args:
        hf_config: the whole file.
        settings: fields of the provider.

    Returns:
        The provider, not finalized.

    Raises:
        ValueError: a setting this model does not honour, or another model's configuration.
        TypeError: a setting that is no field of the provider.
    """
    return provider_of((Qwen35VLBridge, Qwen35VLMoEBridge), hf_config, settings)
