"""Adapters of Megatron-Bridge have the private parts that are read."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("adapters")
PEFT = "megatron.bridge.peft"


def test_megatron_bridge_adapters_have_private_attributes_that_we_read():
    CONTRACT.takes(f"{PEFT}.utils", "ParallelLinearAdapter._get_init_fn", "self", "init_method")
    CONTRACT.mentions(f"{PEFT}.module_matcher", "ModuleMatcher", "_alias_to_pattern")
    CONTRACT.mentions(f"{PEFT}.adapter_wrapper", "AdapterWrapper.__init__", "self._adapter_enabled")
    CONTRACT.takes(f"{PEFT}.dora_layers", "DoRALinear._get_weight_norm", "self")


def test_written_targets_returns_registered_target_aliases():
    CONTRACT.takes(f"{PEFT}.module_matcher", "ModuleMatcher.register_target_alias", "self", "alias", "pattern")
    from qwen3vl_bridge.upstream.adapters import written_targets

    from megatron.bridge.peft.lora import LoRA

    peft = LoRA()
    assert written_targets(peft) == {}
    peft.register_target_alias("linear_q", "linear_qkv")
    assert written_targets(peft) == {"linear_q": "linear_qkv"}
