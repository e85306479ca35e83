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
    # The output layer and the decoder learn from multi-token prediction, which is one layer of its own.
    "mtp_detach_heads": False,
    "mtp_use_repeated_layer": False,
}

_CHOICES = ("mtp_num_layers",)  # that this family has, and others have not


def _fixed(shared: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: only for name, only in {**shared, **_SHARED, **own}.items() if name not in _CHOICES}


FIXED: Mapping[str, Any] = _fixed(fixed.FIXED, {"num_moe_experts": None})

FIXED_WITH_EXPERTS: Mapping[str, Any] = _fixed(
    fixed.FIXED_WITH_EXPERTS, {"moe_shared_expert_gate": True, "moe_layer_freq": 1}
)
