"""Settings of Megatron's configuration that Qwen3.5-VL does not follow, each with the only value it may have, and what
its linear attention asks of the others.

What lives here: these tables. What may not: settings with a choice, those of every family
(`models/common/settings/fixed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from qwen3vl_bridge.models.common.settings import fixed
from qwen3vl_bridge.models.common.settings.rules import Row, Rule, When, multiple_of, only

_SHARED: Mapping[str, Row] = {
    **only(
        fixed.NOTHING_ELSE,
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        experimental_attention_variant="gated_delta_net",
    ),
    **only("megatron-core's linear attention then takes no packed rows", deterministic_mode=False),
    **only("transformers computes no scaled rotary embedding of this family", rope_parameters=None),
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

RULES: tuple[Rule, ...] = (
    Row(
        "sequence_parallel",
        True,
        "else megatron-core does not add up the gradients of linear attention's output norm over the ranks",
        When("tensor_model_parallel_size", lambda provider: provider.tensor_model_parallel_size > 1),
    ),
    Row("linear_num_key_heads", _HEADS, _HEADS_ARE_DIVIDED),
    Row("linear_num_value_heads", _HEADS, _HEADS_ARE_DIVIDED),
)
