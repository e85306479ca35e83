"""The bridge: creates our provider from a Hugging Face configuration, and is registered with Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.bridge import FamilyBridge, provider_by_model_type, scaled_rope
from qwen3vl_bridge.models.hf_config import TOKEN_IDS
from qwen3vl_bridge.models.qwen3_vl.config import FAMILY_NAME, moe_layers_of, rope_parameters
from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLModel
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from qwen3vl_bridge.models.saved_providers import register_replacement

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.qwen_vl import qwen3_vl_provider as stock
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration


def _rope_of_text(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Scaled rotary embedding, which Megatron-Bridge's provider saves in the text configuration in addition to its
    fields.
    """
    text = saved.get("hf_text_config")
    return {} if text is None else {"rope_parameters": scaled_rope(rope_parameters(text.to_dict()))}


register_replacement(stock.Qwen3VLModelProvider, Qwen3VLModelProvider, elsewhere=_rope_of_text)
register_replacement(stock.Qwen3VLMoEModelProvider, Qwen3VLMoEModelProvider, elsewhere=_rope_of_text)


@MegatronModelBridge.register_bridge(
    source=Qwen3VLForConditionalGeneration, target=Qwen3VLModel, provider=Qwen3VLModelProvider, model_type="qwen3_vl"
)
class Qwen3VLBridge(FamilyBridge):
    """AutoBridge support for dense Qwen3-VL."""

    family = FAMILY_NAME

    def provider_fields(self, config: Any) -> dict[str, Any]:
        """See FamilyBridge."""
        text = config.text_config
        rope, moe_layers = rope_parameters(text.to_dict()), moe_layers_of(text.to_dict())
        fields = dict(
            ffn_hidden_size=text.intermediate_size,
            rotary_base=rope["rope_theta"],
            mrope_section=rope["mrope_section"],
            rope_parameters=scaled_rope(rope),
        )
        if moe_layers:
            # If this is a list, megatron-core takes layers for different ones, and a checkpoint then names each.
            layers = range(text.num_hidden_layers)
            same = len(moe_layers) == len(layers)
            fields["moe_layer_freq"] = 1 if same else [int(layer in moe_layers) for layer in layers]
        return super().provider_fields(config) | fields

    @classmethod
    def megatron_to_hf_config(cls, provider: Qwen3VLModelProvider) -> dict[str, Any]:
        """A provider's model as a transformers configuration, for `AutoBridge.from_auto_config`.

        Megatron-Bridge's own function does not map a text model's sizes, and would keep those of its reference
        configuration. Taken from the reference here: the maximum row length, because a provider has only that of a run.
        """
        text, vision = provider.hf_text_config.to_dict(), provider.vision_config.to_dict()
        del text["max_position_embeddings"]
        return dict(
            architectures=[cls.SOURCE_NAME],
            model_type=cls.MODEL_TYPE,
            text_config={name: value for name, value in text.items() if value is not None},
            vision_config={name: value for name, value in vision.items() if value is not None},
            tie_word_embeddings=provider.share_embeddings_and_output_weights,
            **{name: getattr(provider, name) for name in TOKEN_IDS},
        )


@MegatronModelBridge.register_bridge(
    source=Qwen3VLMoeForConditionalGeneration,
    target=Qwen3VLModel,
    provider=Qwen3VLMoEModelProvider,
    model_type="qwen3_vl_moe",
)
class Qwen3VLMoEBridge(Qwen3VLBridge):
    """AutoBridge support for Qwen3-VL with experts (MoE)."""


def provider_from_hf_config(hf_config: Mapping[str, Any], **settings: Any) -> Qwen3VLModelProvider:
    """See `provider_by_model_type`. The `run_config.yaml` of a converted checkpoint has this name and its arguments."""
    return provider_by_model_type((Qwen3VLBridge, Qwen3VLMoEBridge), hf_config, settings)
