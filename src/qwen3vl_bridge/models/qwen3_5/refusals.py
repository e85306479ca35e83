"""Megatron settings that Qwen3.5-VL does not support, and constraints of its linear attention and MTP on other
settings.
"""

from __future__ import annotations

from collections.abc import Mapping

from qwen3vl_bridge.models.settings import fixed
from qwen3vl_bridge.models.settings.rules import Row, Rule, When, any_of, multiple_of, only

_SHARED: Mapping[str, Row] = {
    **only(
        fixed.NOTHING_ELSE,
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        experimental_attention_variant="gated_delta_net",
    ),
    **only("megatron-core's linear attention then takes no packed rows", deterministic_mode=False),
    **only("transformers computes no scaled rotary embedding of this family", rope_parameters=None),
    "mtp_num_layers": Row("mtp_num_layers", any_of(None, 1), "multi-token prediction is one layer"),
    **only(
        "the output layer and the decoder learn from multi-token prediction, which is one separate layer",
        mtp_detach_heads=False,
        mtp_use_repeated_layer=False,
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
    **only(fixed.NOTHING_ELSE, moe_shared_expert_gate=True, moe_layer_freq=1),
}

_HEADS = multiple_of("tensor_model_parallel_size * context_parallel_size")
_HEADS_ARE_DIVIDED = "linear attention divides its heads over both"

_STAGES_WITH_MTP = When(
    "pipeline_model_parallel_size mtp_loss_scaling_factor",
    lambda provider: provider.trains_mtp and provider.pipeline_model_parallel_size > 1,
)
_RECOMPUTED_MTP = When(
    "recompute_granularity mtp_loss_scaling_factor",
    lambda provider: provider.trains_mtp and provider.recompute_granularity == "full",
)
_RECOMPUTED_SO = "megatron-core recomputes multi-token prediction in no other way"

RULES: tuple[Rule, ...] = (
    Row(
        "sequence_parallel",
        True,
        "else megatron-core does not add up the gradients of linear attention's output norm over the ranks",
        When("tensor_model_parallel_size", lambda provider: provider.tensor_model_parallel_size > 1),
    ),
    Row("linear_num_key_heads", _HEADS, _HEADS_ARE_DIVIDED),
    Row("linear_num_value_heads", _HEADS, _HEADS_ARE_DIVIDED),
    Row(
        "variable_seq_lengths",
        True,
        "next tokens go to the last pipeline stage together with hidden states, for multi-token prediction; or set "
        "mtp_loss_scaling_factor=0",
        _STAGES_WITH_MTP,
    ),
    Row("recompute_method", "uniform", _RECOMPUTED_SO, _RECOMPUTED_MTP),
    Row("recompute_num_layers", 1, _RECOMPUTED_SO, _RECOMPUTED_MTP),
)
