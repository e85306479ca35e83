"""The Qwen3-VL bridges, registered with Megatron-Bridge: from a Hugging Face configuration to our provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.config.hf_config import TOKEN_IDS, rope_provider_fields
from qwen3vl_bridge.models.common.bridge import FamilyBridge, provider_by_model_type
from qwen3vl_bridge.models.common.provider import register_replacement
from qwen3vl_bridge.models.qwen3_vl.config import FAMILY_NAME, moe_layers_of, rope_parameters
from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLModel
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.qwen_vl import qwen3_vl_provider as stock
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration


def _saved_rope(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"rope_parameters": value} from a text configuration saved by Megatron-Bridge, or {} if there is none."""
    text = saved.get("hf_text_config")
    if text is None:
        return {}
    return {"rope_parameters": rope_provider_fields(rope_parameters(text.to_dict()))["rope_parameters"]}


register_replacement(stock.Qwen3VLModelProvider, Qwen3VLModelProvider, convert=_saved_rope)
register_replacement(stock.Qwen3VLMoEModelProvider, Qwen3VLMoEModelProvider, convert=_saved_rope)


@MegatronModelBridge.register_bridge(
    source=Qwen3VLForConditionalGeneration, target=Qwen3VLModel, provider=Qwen3VLModelProvider, model_type="qwen3_vl"
)
class Qwen3VLBridge(FamilyBridge):
    """AutoBridge support for dense Qwen3-VL."""

    family = FAMILY_NAME

    def provider_fields(self, config: Any) -> dict[str, Any]:
        """Return the provider's fields from a Hugging Face configuration."""
        text = config.text_config
        fields = super().provider_fields(config) | rope_provider_fields(rope_parameters(text.to_dict()))
        fields["ffn_hidden_size"] = text.intermediate_size
        if moe_layers := moe_layers_of(text.to_dict()):
            # With a list, megatron-core treats layers as different, and a checkpoint then names each layer.
            layers = range(text.num_hidden_layers)
            all_moe = len(moe_layers) == len(layers)
            fields["moe_layer_freq"] = 1 if all_moe else [int(layer in moe_layers) for layer in layers]
        return fields

    @classmethod
    def megatron_to_hf_config(cls, provider: Qwen3VLModelProvider) -> dict[str, Any]:
        """Return the contents of a `config.json` for a provider's model, without `max_position_embeddings`.

        `AutoBridge.from_auto_config` merges the contents into a reference configuration, which sets the missing field.
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
    """Return a provider for a `config.json`, see `provider_by_model_type`.

    The `run_config.yaml` of a converted checkpoint contains the name and the arguments of this function.
    """
    return provider_by_model_type((Qwen3VLBridge, Qwen3VLMoEBridge), hf_config, settings)
