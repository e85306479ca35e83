"""The provider: the complete configuration of a Qwen3.5-VL model and its training, as one dataclass."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import ClassVar

from qwen3vl_bridge.models.provider import ExpertsMixin, VisionLanguageProvider
from qwen3vl_bridge.models.qwen3_5.config import FAMILY_NAME, LINEAR_SIZES, TOKENS, own_dimensions
from qwen3vl_bridge.models.qwen3_5.delta_rule import check_package
from qwen3vl_bridge.models.qwen3_5.model import Qwen35VLModel
from qwen3vl_bridge.models.refusals import NOTHING_ELSE
from qwen3vl_bridge.models.rules import IGNORED, Allowed, Rule, above, any_of, equal, is_off, is_on, keep
from qwen3vl_bridge.weights.rows import Dimensions

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig

logger = logging.getLogger(__name__)

_MTP = is_on("mtp_loss_scaling_factor") & (lambda model: model.trains_mtp)
_RECOMPUTED_MTP = equal("recompute_granularity", "full") & _MTP
_RECOMPUTED_SO = "megatron-core recomputes multi-token prediction in no other way"

_RULES: tuple[Rule, ...] = (
    *keep("linear_attention_in_proj_bf16", IGNORED, is_off("fp8") & is_off("fp4")),
    *keep("deterministic_mode", "megatron-core's linear attention then takes no packed rows"),
    Allowed("mtp_num_layers", any_of(None, 1)).because("multi-token prediction is one layer"),
    *keep(
        "mtp_detach_heads mtp_use_repeated_layer",
        "the output layer and the decoder learn from multi-token prediction, which is one separate layer",
    ),
    Allowed("sequence_parallel", True, above("tensor_model_parallel_size", 1)).because(
        "else megatron-core does not add up the gradients of linear attention's output norm over the ranks"
    ),
    Allowed("variable_seq_lengths", True, above("pipeline_model_parallel_size", 1) & _MTP).because(
        "next tokens go to the last pipeline stage together with hidden states, for multi-token prediction; or set "
        "mtp_loss_scaling_factor=0"
    ),
    Allowed("recompute_method", "uniform", _RECOMPUTED_MTP).because(_RECOMPUTED_SO),
    Allowed("recompute_num_layers", 1, _RECOMPUTED_MTP).because(_RECOMPUTED_SO),
)


@dataclass
class Qwen35VLModelProvider(VisionLanguageProvider):
    """Provider of the dense Qwen3.5-VL model, and base class of the MoE provider.

    All token ids and defaults are those of the released models. `VisionLanguageFields` documents the other fields.

    Attributes:
        linear_attention_freq: n, if every n-th layer has full attention and the others linear attention; or a list with
            1 for each layer with linear attention and 0 for each layer with full attention.
        linear_conv_kernel_dim: kernel size of the convolution in linear attention.
        linear_key_head_dim, linear_value_head_dim, linear_num_key_heads, linear_num_value_heads: head dimensions and
            numbers of heads of linear attention.
        linear_attention_in_proj_bf16: with `fp8` or `fp4`, compute the input projection of linear attention in the
            parameters' dtype, at any tensor-parallel size: its columns for gates and decays, two for each head of
            values, make a rank's part no multiple of 16 at TP 8, nor of 32 (mxfp8) at TP 4.
        rotary_percent: fraction of each head's dimensions with rotary embeddings.
        mtp_num_layers: 1 for a model with multi-token prediction, else None.
        mtp_loss_scaling_factor: weight of a token's multi-token prediction loss relative to its own loss; 0.1 is usual.
            With 0 these weights are frozen but kept, so that they can be exported.
    """

    vision_config: Qwen3_5VisionConfig = field(default_factory=Qwen3_5VisionConfig)

    image_token_id: int = TOKENS["image_token_id"]
    video_token_id: int = TOKENS["video_token_id"]
    vision_start_token_id: int = TOKENS["vision_start_token_id"]
    vision_end_token_id: int = TOKENS["vision_end_token_id"]
    bos_token_id: int = 248045
    eos_token_id: int = 248044

    layernorm_zero_centered_gamma: bool = True
    qk_layernorm: bool = True
    attention_output_gate: bool = True
    kv_channels: int | None = 256
    rotary_base: float = 10_000_000.0
    rotary_percent: float = 0.25
    mrope_section: list[int] = field(default_factory=lambda: [11, 11, 10])

    experimental_attention_variant: str | None = "gated_delta_net"
    linear_attention_freq: int | list[int] = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    linear_attention_in_proj_bf16: bool = False

    mtp_num_layers: int | None = 1
    mtp_loss_scaling_factor: float | None = 0.0

    family: ClassVar[str] = FAMILY_NAME
    model_class = Qwen35VLModel
    rules: ClassVar[tuple[Rule, ...]] = _RULES

    def finalize(self) -> None:
        """See VisionLanguageProvider."""
        super().finalize()
        if self.mtp_num_layers and not self.trains_mtp:
            logger.info("multi-token prediction is not trained; set mtp_loss_scaling_factor=0.1 to train it")
        check_package()

    @property
    def layers_in_16_bits(self) -> tuple[str, ...]:
        """See VisionLanguageProvider."""
        return ("in_proj",) if self.linear_attention_in_proj_bf16 else ()

    def dimensions(self) -> Dimensions:
        """Values of the weight table's symbols; the vocabulary without padding."""
        return own_dimensions(
            super().dimensions(),
            {name: getattr(self, name) for name in LINEAR_SIZES},
            is_linear=get_linear_attention_pattern(self),
            shared_ffn=self.moe_shared_expert_intermediate_size,
            mtp=self.mtp_num_layers,
        )


@dataclass
class Qwen35VLMoEModelProvider(ExpertsMixin, Qwen35VLModelProvider):
    """Provider of Qwen3.5-VL with experts (MoE): the differences from the dense model.

    Attributes:
        moe_shared_expert_intermediate_size: width of the shared expert, which processes every token.
        moe_shared_expert_gate: whether the shared expert's output is gated.
    """

    num_moe_experts: int | None = 256
    moe_router_topk: int = 8
    moe_ffn_hidden_size: int | None = 512
    moe_shared_expert_intermediate_size: int | None = 512
    moe_shared_expert_gate: bool = True
    moe_aux_loss_coeff: float | list[float] = 1e-3

    rules: ClassVar[tuple[Rule, ...]] = (*_RULES, *keep("moe_shared_expert_gate moe_layer_freq", NOTHING_ELSE))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts: all of them."""
        return tuple(range(self.num_layers))
