"""Megatron-Bridge's numbers of layers and experts in the unsharded model."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("parameter_names")


def test_megatron_local_name_to_global_has_expected_parameters():
    CONTRACT.takes(
        "megatron.bridge.models.conversion.model_bridge", "_megatron_local_name_to_global",
        *("models", "config", "param_name", "vp_stage"),
    )  # fmt: skip
