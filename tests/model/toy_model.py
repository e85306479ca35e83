"""Toy-VL on Megatron: the provider, the model and the bridge. Loaded when one of them is first asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qwen3vl_bridge.models.bridge import FamilyBridge
from qwen3vl_bridge.models.model import VisionLanguageModel
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.refusals import NOTHING_ELSE
from qwen3vl_bridge.models.rules import Rule, keep

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from transformers import PretrainedConfig

from tests.model.toy_family import NAME, SAME, check

# Converted checkpoints and saved runs name `provider_from_hf_config` and `ToyProvider`; others are not built.
register_allowed_target_prefix("tests.model.toy_model.")

_TOKENS = ("eos_token_id", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class ToyModel(VisionLanguageModel):
    """Both towers as all families have them: what differs, settings and configuration say."""


@dataclass
class ToyProvider(VisionLanguageProvider):
    family: ClassVar[str] = NAME
    model_class = ToyModel
    rules: ClassVar[tuple[Rule, ...]] = keep("rotary_percent", NOTHING_ELSE)


def provider_from_hf_config(hf_config: Mapping[str, Any], **settings: Any) -> ToyProvider:
    """The provider of a `config.json`, not finalized."""
    check(hf_config)
    return ToyProvider(
        **{megatron: hf_config["text_config"][hf] for megatron, hf in SAME.items()},
        **{name: hf_config[name] for name in _TOKENS},
        vision_config=PretrainedConfig.from_dict(dict(hf_config["vision_config"])), **settings,
    )  # fmt: skip


@MegatronModelBridge.register_bridge(
    source="ToyVLForConditionalGeneration", target=ToyModel, provider=ToyProvider, model_type="toy_vl"
)
class ToyBridge(FamilyBridge):
    family = NAME

    def provider_bridge(self, hf_pretrained: Any) -> ToyProvider:
        return provider_from_hf_config(hf_pretrained.config.to_dict())
