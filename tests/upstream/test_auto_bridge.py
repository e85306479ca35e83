"""An `AutoBridge` has the bridge of its model's family."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("auto_bridge")


def test_auto_bridge_private_model_bridge_is_a_property():
    CONTRACT.find("megatron.bridge.models.conversion.auto_bridge", "AutoBridge._model_bridge", property)
