"""Megatron-Bridge converts adapters by the methods that are overridden or called."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("peft_bridge")
MODULE = "megatron.bridge.models.conversion.peft_bridge"
BRIDGE = "megatron.bridge.models.conversion.model_bridge"


def test_peft_bridge_methods_that_we_override_have_expected_parameters():
    CONTRACT.takes(MODULE, "MegatronPeftBridge._megatron_global_adapters_info_all_pp_ranks", "self", "megatron_model")
    CONTRACT.takes(
        MODULE, "MegatronPeftBridge._merge_lora_adapter_weights",
        "self", "megatron_model", "converted_weights_dict", "adapter_weights",
    )  # fmt: skip
    CONTRACT.takes(
        MODULE, "MegatronPeftBridge._merge_grouped_export_adapter_weights",
        "self", "task", "converted_weights_dict", "adapter_weights", "num_moe_experts",
    )  # fmt: skip
    CONTRACT.mentions(
        MODULE, "MegatronPeftBridge.build_adapter_conversion_tasks", "_megatron_global_adapters_info_all_pp_ranks"
    )
    CONTRACT.mentions(
        BRIDGE, "MegatronModelBridge.stream_weights_megatron_to_hf", "_merge_lora_adapter_weights",
        "_merge_grouped_export_adapter_weights",
    )  # fmt: skip


def test_peft_bridge_methods_that_we_call_have_expected_parameters():
    CONTRACT.takes(MODULE, "MegatronPeftBridge._gather_expert_adapter_weight", "self", "weight")
    CONTRACT.takes(
        BRIDGE, "MegatronModelBridge._with_progress_tracking", "self", "tasks", "description", "show_progress"
    )
