"""Settings of Megatron's configuration that Qwen3.5-VL does not follow, each with the only value it may have.

What lives here: the values; the provider's `finalize` refuses others. What may not: settings with a choice, those of
every family (`models/common/settings/fixed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.common.settings import fixed

_SHARED: Mapping[str, Any] = {
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "experimental_attention_variant": "gated_delta_net",
    # megatron-core's linear attention then takes no packed rows.
    "deterministic_mode": False,
    # A scaled rotary embedding is in no configuration of this family that transformers computes.
    "rope_parameters": None,
}

FIXED: Mapping[str, Any] = {**fixed.FIXED, **_SHARED, "num_moe_experts": None}

FIXED_WITH_EXPERTS: Mapping[str, Any] = {
    **fixed.FIXED_WITH_EXPERTS,
    **_SHARED,
    "moe_shared_expert_gate": True,
    "moe_layer_freq": 1,
}
