"""The Qwen3-VL providers: the configuration of a model and its training as a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from qwen3vl_bridge.config.checks import Check, requires_default
from qwen3vl_bridge.config.fields import activation_name, attribute_alias
from qwen3vl_bridge.config.hf_config import EXPERT_FIELDS, TEXT_FIELDS
from qwen3vl_bridge.config.model_validation import FIXED_ARCHITECTURE, ignored_settings
from qwen3vl_bridge.models.common.provider import ExpertsMixin, VisionLanguageProvider
from qwen3vl_bridge.models.qwen3_vl.config import FAMILY_NAME, TOKENS, check_deepstack
from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLModel

from transformers import Qwen3VLMoeTextConfig, Qwen3VLTextConfig, Qwen3VLVisionConfig


@dataclass
class Qwen3VLModelProvider(VisionLanguageProvider):
    """Provider of the dense Qwen3-VL model, and base class of the MoE provider.

    Token ids and defaults are as in the released models. `VisionLanguageFields` documents the fields.
    """

    vision_config: Qwen3VLVisionConfig = field(default_factory=Qwen3VLVisionConfig)

    image_token_id: int = TOKENS["image_token_id"]
    video_token_id: int = TOKENS["video_token_id"]
    vision_start_token_id: int = TOKENS["vision_start_token_id"]
    vision_end_token_id: int = TOKENS["vision_end_token_id"]
    bos_token_id: int = 151643
    eos_token_id: int = 151645

    qk_layernorm: bool = True
    rotary_base: float = 5_000_000.0
    mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])

    family: ClassVar[str] = FAMILY_NAME
    model_class = Qwen3VLModel
    vision_module_class: ClassVar[str] = "qwen3vl_bridge.dist_train.modules.Qwen3VLVisionModule"
    language_module_class: ClassVar[str] = "qwen3vl_bridge.dist_train.modules.Qwen3VLLanguageModule"
    checks: ClassVar[tuple[Check, ...]] = (
        lambda model: check_deepstack(model.vision_config.to_dict(), model.num_layers),
        *requires_default("rotary_percent mtp_num_layers", FIXED_ARCHITECTURE),
        *ignored_settings(
            "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
            "linear_num_key_heads linear_num_value_heads mtp_use_repeated_layer mtp_detach_heads"
        ),
    )

    # Attributes of Megatron-Bridge's own provider that callers read and write (docs/callers.md).
    patch_size = attribute_alias("vision_config.patch_size")
    spatial_merge_size = attribute_alias("vision_config.spatial_merge_size")
    deepstack_visual_indexes = attribute_alias("vision_config.deepstack_visual_indexes")
    # Rotary positions have no limit here, so setting it has no effect.
    language_max_sequence_length = property(lambda self: self.seq_length, lambda self, _: None)

    @property
    def hf_text_config(self) -> Qwen3VLTextConfig | Qwen3VLMoeTextConfig:
        """Return a transformers configuration of the text model. Changes to it do not affect the provider."""
        rope = {"rope_type": "default", **self.rope_fields, **(self.rope_parameters or {}), "mrope_interleaved": True}
        shared = {of_text: getattr(self, name) for name, of_text in TEXT_FIELDS.items()} | dict(
            vocab_size=self.vocab_size,
            intermediate_size=self.ffn_hidden_size,
            num_key_value_heads=self.num_query_groups or self.num_attention_heads,
            hidden_act=activation_name(self.activation_func),
            max_position_embeddings=self.seq_length,
            initializer_range=self.init_method_std,
            attention_dropout=self.attention_dropout,
            rope_parameters=rope,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.pad_token_id,
            tie_word_embeddings=self.share_embeddings_and_output_weights,
        )
        if not self.moe_layers:
            return Qwen3VLTextConfig(**shared)
        return Qwen3VLMoeTextConfig(
            **shared,
            **{of_text: getattr(self, name) for name, of_text in EXPERT_FIELDS.items()},
            decoder_sparse_step=1,
            mlp_only_layers=[layer for layer in range(self.num_layers) if layer not in self.moe_layers],
        )

    @hf_text_config.setter
    def hf_text_config(self, _: object) -> None:
        raise ValueError("hf_text_config is read-only: set the provider's fields instead, such as hidden_size")


@dataclass
class Qwen3VLMoEModelProvider(ExpertsMixin, Qwen3VLModelProvider):
    """Provider of Qwen3-VL with experts (MoE)."""

    num_moe_experts: int | None = 128
    moe_router_topk: int = 8
    moe_ffn_hidden_size: int | None = 768
    moe_aux_loss_coeff: float | list[float] = 1e-3

    checks: ClassVar[tuple[Check, ...]] = (
        *Qwen3VLModelProvider.checks,
        *requires_default("moe_shared_expert_intermediate_size moe_shared_expert_gate", FIXED_ARCHITECTURE),
    )
