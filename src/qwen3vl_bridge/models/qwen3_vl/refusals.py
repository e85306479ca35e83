"""Megatron settings that Qwen3-VL does not support, each with the only value that is accepted."""

from __future__ import annotations

from collections.abc import Mapping

from qwen3vl_bridge.models.qwen3_vl.config import check_deepstack
from qwen3vl_bridge.models.qwen3_vl.upstream_names import check_names
from qwen3vl_bridge.models.settings import fixed
from qwen3vl_bridge.models.settings.fields import VisionLanguageFields
from qwen3vl_bridge.models.settings.rules import Row, Rule, only

_SHARED: Mapping[str, Row] = {
    **only(
        fixed.NOTHING_ELSE,
        rotary_percent=1.0,
        attention_output_gate=False,
        layernorm_zero_centered_gamma=False,
        experimental_attention_variant=None,
    ),
    **fixed.unread(
        "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
        "linear_num_value_heads mtp_use_repeated_layer mtp_detach_heads"
    ),
}

FIXED: Mapping[str, Row] = {
    **fixed.FIXED,
    **_SHARED,
    **only("a model with experts has the provider of such models", num_moe_experts=None),
}

FIXED_WITH_EXPERTS: Mapping[str, Row] = {
    **fixed.FIXED_WITH_EXPERTS,
    **_SHARED,
    **only(fixed.NOTHING_ELSE, moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False),
}


def _check_deepstack(provider: VisionLanguageFields) -> None:
    check_deepstack(provider.vision_config.to_dict(), provider.num_layers)


RULES: tuple[Rule, ...] = (_check_deepstack, check_names)
