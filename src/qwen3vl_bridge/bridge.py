"""The bridge: a Hugging Face configuration becomes our provider, the weight table becomes Megatron-Bridge's mappings.

What lives here: the two translations and the registration with Megatron-Bridge. What may not: parameter names
(`mappings.py`), defaults (`provider.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qwen3vl_bridge import mappings
from qwen3vl_bridge.model.qwen3vl import Qwen3VLModel
from qwen3vl_bridge.provider import Qwen3VLModelProvider

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ConcatenatedQKVMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    QKVMapping,
    ReplicatedMapping,
)
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from transformers import Qwen3VLForConditionalGeneration

# A saved run_config.yaml names our classes; Megatron-Bridge builds only what is allowed.
register_allowed_target_prefix("qwen3vl_bridge.")

_MAPPING_OF: dict[type[mappings.Row], Callable[..., MegatronParamMapping]] = {
    mappings.Copy: AutoMapping,
    mappings.QKV: QKVMapping,
    mappings.ConcatenatedQKV: ConcatenatedQKVMapping,
    mappings.GatedMLP: GatedMLPMapping,
}


def megatron_bridge_mappings(rows: tuple[mappings.Row, ...]) -> Iterator[MegatronParamMapping]:
    """Megatron-Bridge's mapping of each row, for the names of both layer specs."""
    for row in rows:
        make = ReplicatedMapping if row.replicated else _MAPPING_OF[type(row)]
        for name in dict.fromkeys((row.megatron, mappings.local_name(row.megatron))):
            yield make(name, *row.hf)


def _rope_parameters(text: Any) -> Mapping[str, Any]:
    """The rotary settings, in the spelling of transformers 5 or before.

    Raises:
        ValueError: a kind of rotary embedding that this model does not compute.
    """
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise ValueError(f"rope type is {kind!r}, expected 'default': scaled rotary embeddings are not computed")
    if not rope.get("mrope_interleaved", True):
        raise ValueError("mrope_interleaved is False, expected True as in every Qwen3-VL")
    rope.setdefault("rope_theta", getattr(text, "rope_theta", None))
    for name in ("rope_theta", "mrope_section"):
        if rope.get(name) is None:
            raise ValueError(f"text_config has no {name}, neither in rope_parameters nor elsewhere")
    return rope


@MegatronModelBridge.register_bridge(
    source=Qwen3VLForConditionalGeneration,
    target=Qwen3VLModel,
    provider=Qwen3VLModelProvider,
    model_type="qwen3_vl",
)
class Qwen3VLBridge(MegatronModelBridge):
    """Dense Qwen3-VL for AutoBridge."""

    def provider_bridge(self, hf_pretrained: Any) -> Qwen3VLModelProvider:
        """The provider of a Hugging Face model.

        Args:
            hf_pretrained: anything with a `config`, a Qwen3VLConfig.

        Raises:
            ValueError: a setting this model does not honour.
        """
        config = hf_pretrained.config
        text, rope = config.text_config, _rope_parameters(config.text_config)
        dtype = self.dtype_from_hf(text, default=self.dtype_from_hf(config, default=torch.float32))
        return Qwen3VLModelProvider(
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            ffn_hidden_size=text.intermediate_size,
            num_attention_heads=text.num_attention_heads,
            num_query_groups=text.num_key_value_heads,
            kv_channels=text.head_dim,
            vocab_size=text.vocab_size,
            seq_length=text.max_position_embeddings,
            layernorm_epsilon=text.rms_norm_eps,
            init_method_std=text.initializer_range,
            attention_dropout=text.attention_dropout,
            add_qkv_bias=text.attention_bias,
            activation_func=self.hf_to_megatron_activation(text.hidden_act),
            rotary_base=rope["rope_theta"],
            mrope_section=list(rope["mrope_section"]),
            # transformers keeps the setting on the whole model's configuration; the text part's is a default.
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by(text.vocab_size),
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            vision_config=config.vision_config,
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            vision_start_token_id=config.vision_start_token_id,
            vision_end_token_id=config.vision_end_token_id,
            **{
                name: getattr(text, name)
                for name in ("bos_token_id", "eos_token_id")
                if getattr(text, name, None) is not None
            },
        )

    def mapping_registry(self) -> MegatronMappingRegistry:
        """The weight table as Megatron-Bridge's mappings."""
        return MegatronMappingRegistry(*megatron_bridge_mappings(mappings.DENSE_ROWS))
