"""Define Toy-VL on Megatron: provider, model and bridge. Imported when one of them is first used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qwen3vl_bridge.config.checks import Check, requires_default
from qwen3vl_bridge.config.model_validation import FIXED_ARCHITECTURE
from qwen3vl_bridge.models.common.bridge import FamilyBridge
from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.weights.bridge_mappings import InputMajor

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from transformers import PretrainedConfig

from tests.models.toy_family import NAME, SAME, check

# Converted checkpoints and saved runs name `provider_from_hf_config` and `ToyProvider`. Without this line,
# Megatron-Bridge would not call them.
register_allowed_target_prefix("tests.models.toy_model.")

_TOKENS = ("eos_token_id", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class InputMajorMapping(InputMajor, AutoMapping):
    """Megatron-Bridge's mapping for rows of the kind `toy_family.InputMajor`."""


class ToyModel(VisionLanguageModel):
    """A vision tower and a language model without additions."""


@dataclass
class ToyProvider(VisionLanguageProvider):
    family: ClassVar[str] = NAME
    model_class = ToyModel
    checks: ClassVar[tuple[Check, ...]] = requires_default("rotary_percent", FIXED_ARCHITECTURE)


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
