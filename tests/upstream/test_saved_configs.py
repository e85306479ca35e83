"""`_resolve_target` turns the targets of saved configurations into classes, for Megatron-Bridge too."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("saved_configs")
MEGATRON, BRIDGE = "megatron.training.config.instantiate_utils", "megatron.bridge.utils.instantiate_utils"


def test_saved_megatron_bridge_provider_target_is_instantiated_as_our_provider():
    CONTRACT.takes(MEGATRON, "_resolve_target", "target", "full_key", "check_callable")
    CONTRACT.find(BRIDGE, "_mcore_instantiate_utils._resolve_target")
    CONTRACT.mentions(MEGATRON, "instantiate_node", "_resolve_target")
    from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider

    from megatron.bridge.utils.instantiate_utils import instantiate

    target = "megatron.bridge.models.qwen_vl.qwen3_vl_provider.Qwen3VLModelProvider"
    if type(instantiate({"_target_": target})) is not Qwen3VLModelProvider:
        CONTRACT.fail(BRIDGE, f"instantiate does not call the replaced function for {target}")
