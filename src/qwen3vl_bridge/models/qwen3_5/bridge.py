"""The Qwen3.5-VL bridges, registered with Megatron-Bridge: from a Hugging Face configuration to our provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.common.bridge import provider_by_model_type
from qwen3vl_bridge.models.common.hybrid_bridge import HybridBridge
from qwen3vl_bridge.models.common.provider import register_replacement
from qwen3vl_bridge.models.qwen3_5.config import FAMILY_NAME
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
class Qwen35VLBridge(HybridBridge):
    """AutoBridge support for dense Qwen3.5-VL."""

    family = FAMILY_NAME


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
