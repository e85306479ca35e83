"""Settings of Megatron's configuration that Qwen3-VL does not follow, each with the only value it may have.

What lives here: the values; the provider's `finalize` refuses others. What may not: settings with a choice, those of
every family (`models/common/settings/fixed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.common.settings import fixed

_SHARED: Mapping[str, Any] = {
    "rotary_percent": 1.0,
    "attention_output_gate": False,
    "layernorm_zero_centered_gamma": False,
    "experimental_attention_variant": None,
}

FIXED: Mapping[str, Any] = {**fixed.FIXED, **_SHARED, "num_moe_experts": None}

FIXED_WITH_EXPERTS: Mapping[str, Any] = {
    **fixed.FIXED_WITH_EXPERTS,
    **_SHARED,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
}
