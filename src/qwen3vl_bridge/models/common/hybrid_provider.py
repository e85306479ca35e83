"""The base class of the providers of hybrid models, whose text layers have linear or full attention."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from qwen3vl_bridge.config.checks import (
    IGNORED,
    Check,
    Requires,
    equals,
    is_above,
    is_off,
    is_on,
    one_of,
    requires_default,
)
from qwen3vl_bridge.config.divisibility import CHUNKWISE, HEADWISE
from qwen3vl_bridge.config.hybrid_config import LINEAR_SIZES, TOKENS, add_dimensions
from qwen3vl_bridge.config.model_validation import FIXED_ARCHITECTURE
from qwen3vl_bridge.models.common.delta_rule import check_package
from qwen3vl_bridge.models.common.provider import ExpertsMixin, VisionLanguageProvider
from qwen3vl_bridge.upstream.gated_delta_net import with_divisible_heads
from qwen3vl_bridge.weights.rows import Dimensions

from megatron.core.models.gpt import experimental_attention_variant_module_specs as attention_variants

logger = logging.getLogger(__name__)

# megatron-core 0.20 renamed the variant. Saved runs may have either name.
_GATED_DELTA_NET = ("gated_delta_net", "gdn")
_INSTALLED_NAME = _GATED_DELTA_NET[hasattr(attention_variants, "GDN_ATTENTION_VARIANTS")]

_MTP = is_on("mtp_loss_scaling_factor") & (lambda model: model.trains_mtp)
_RECOMPUTED_MTP = equals("recompute_granularity", "full") & _MTP
_ONLY_UNIFORM = "megatron-core recomputes multi-token prediction only layer by layer"

HYBRID_CHECKS: tuple[Check, ...] = (
    *requires_default("linear_attention_in_proj_bf16", IGNORED, is_off("fp8") & is_off("fp4")),
    *requires_default("deterministic_mode", "megatron-core's deterministic linear attention supports no packed rows"),
    Requires("mtp_num_layers", one_of(None, 1), why="multi-token prediction has one layer"),
    *requires_default("mtp_detach_heads mtp_use_repeated_layer", FIXED_ARCHITECTURE),
    Requires(
        "sequence_parallel", True, is_above("tensor_model_parallel_size", 1),
        why="otherwise megatron-core does not add up the gradients of linear attention's output norm over the ranks",
    ),
    Requires(
        "variable_seq_lengths", True, is_above("pipeline_model_parallel_size", 1) & _MTP,
        why="hidden states are sent to the last pipeline stage together with the next tokens for multi-token "
        "prediction; or set mtp_loss_scaling_factor=0",
    ),
    Requires("linear_cp_mode", one_of(None, HEADWISE, CHUNKWISE)),
    Requires("recompute_method", "uniform", _RECOMPUTED_MTP, why=_ONLY_UNIFORM),
    Requires("recompute_num_layers", 1, _RECOMPUTED_MTP, why=_ONLY_UNIFORM),
)  # fmt: skip


@dataclass
class HybridModelProvider(VisionLanguageProvider):
    """Base class of the providers of hybrid models, whose text layers have linear or full attention.

    Token ids and defaults are as in the released models. `VisionLanguageFields` documents the other fields.

    Attributes:
        linear_attention_freq: n, if every n-th layer has full attention and the others linear attention; or a list with
            1 for each layer with linear attention and 0 for each layer with full attention.
        linear_conv_kernel_dim: kernel size of the convolution in linear attention.
        linear_key_head_dim, linear_value_head_dim, linear_num_key_heads, linear_num_value_heads: head dimensions and
            numbers of heads of linear attention.
        linear_attention_in_proj_bf16: with `fp8` or `fp4`, compute the input projection of linear attention in the
            dtype of parameters. It has two output columns per value head for gates and decays. With them the columns of
            a rank are no multiple of 16 at tensor-parallel size 8, and no multiple of 32 (mxfp8) at size 4.
        linear_cp_mode: how linear attention is computed under context parallelism. "headwise": ranks exchange tokens,
            and each computes all tokens of some heads. "chunkwise": ranks keep their tokens and exchange states, which
            are smaller for long documents; tp * cp need not divide the heads; the delta rule is computed a second time.
            None: headwise if tp * cp divides the heads. No effect without context parallelism.
        rotary_percent: fraction of each head's dimensions with rotary embeddings.
        mtp_num_layers: 1 for a model with multi-token prediction, else None.
        mtp_loss_scaling_factor: weight of the multi-token prediction loss relative to the loss of the token; 0.1 is
            usual. With 0 the weights of this prediction are frozen, and are exported unchanged.
    """

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

    experimental_attention_variant: str | None = _INSTALLED_NAME
    linear_attention_freq: int | list[int] = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    linear_attention_in_proj_bf16: bool = False
    linear_cp_mode: Literal["headwise", "chunkwise"] | None = None

    mtp_num_layers: int | None = 1
    mtp_loss_scaling_factor: float | None = 0.0

    checks: ClassVar[tuple[Check, ...]] = HYBRID_CHECKS

    def finalize(self) -> None:
        """Check and adjust the fields, see `VisionLanguageProvider.finalize`. Also check flash-linear-attention."""
        if self.experimental_attention_variant in _GATED_DELTA_NET:
            self.experimental_attention_variant = _INSTALLED_NAME
        super().finalize()
        if self.mtp_num_layers and not self.trains_mtp:
            logger.info("multi-token prediction is not trained; set mtp_loss_scaling_factor=0.1 to train it")
        check_package()

    def finalize_megatron_fields(self) -> None:
        """Check and complete the fields of megatron-core and Megatron-Bridge, except the heads of linear attention.

        megatron-core expects that tp * cp divides the numbers of heads. `linear_cp_mode="chunkwise"` does not need
        this, so `_check_divisible` checks the heads afterwards.
        """
        with with_divisible_heads(self):
            super().finalize_megatron_fields()

    @property
    def layers_in_16_bits(self) -> tuple[str, ...]:
        """Return the decoder's linear layers that never use FP8, by their weight-table names, such as "in_proj"."""
        return ("in_proj",) if self.linear_attention_in_proj_bf16 else ()

    def dimensions(self) -> Dimensions:
        """Return the dimensions that the weight table uses. The vocabulary size does not include padding rows."""
        return add_dimensions(
            super().dimensions(),
            {name: getattr(self, name) for name in LINEAR_SIZES},
            is_linear=attention_variants.get_linear_attention_pattern(self),
            shared_ffn=self.moe_shared_expert_intermediate_size,
            mtp=self.mtp_num_layers,
        )


@dataclass
class HybridExpertsMixin(ExpertsMixin):
    """Additions to the provider of a hybrid model in which every layer has experts and a shared expert.

    Attributes:
        moe_shared_expert_intermediate_size: width of the shared expert, which processes every token.
        moe_shared_expert_gate: gate the output of the shared expert.
    """

    num_moe_experts: int | None = 256
    moe_router_topk: int = 8
    moe_ffn_hidden_size: int | None = 512
    moe_shared_expert_intermediate_size: int | None = 512
    moe_shared_expert_gate: bool = True
    moe_aux_loss_coeff: float | list[float] = 1e-3

    checks: ClassVar[tuple[Check, ...]] = (
        *HYBRID_CHECKS,
        *requires_default("moe_shared_expert_gate moe_layer_freq", FIXED_ARCHITECTURE),
    )

    @property
    def moe_layers(self: Any) -> tuple[int, ...]:
        """Return the indices of all layers, because every layer has experts."""
        return tuple(range(self.num_layers))
