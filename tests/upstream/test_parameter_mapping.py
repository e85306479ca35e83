"""Names of Megatron-Bridge that upstream/parameter_mapping.py calls."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
from torch import nn

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("parameter_mapping")
MAPPING = "megatron.bridge.models.conversion.param_mapping"


def test_param_mapping_get_config_has_expected_parameters():
    CONTRACT.takes(MAPPING, "MegatronParamMapping._get_config", "self", "module")
    CONTRACT.find(MAPPING, "AutoMapping._get_config")


def test_config_of_module_returns_config_attribute():
    from qwen3vl_bridge.upstream.parameter_mapping import ConfigMapping

    module = nn.Linear(1, 1)
    module.config = object()
    assert ConfigMapping("a.weight", "b.weight").config_of(module) is module.config
