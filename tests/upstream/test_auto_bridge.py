"""An `AutoBridge` has the bridge of its model's family."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("auto_bridge")


def test_auto_bridge_model_bridge_is_property():
    CONTRACT.find("megatron.bridge.models.conversion.auto_bridge", "AutoBridge._model_bridge", property)
