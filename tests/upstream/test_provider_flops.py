"""Names of Megatron-Bridge that upstream/provider_flops.py defines."""

import inspect

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("provider_flops")
NAME = "_get_num_floating_point_operations_with_runtime_stats"
ARGUMENTS = ("batch_size", "seqlen_sum", "seqlen_squared_sum", "cross_seqlen_sum", "cross_seqlen_product_sum")


def test_flop_utils_passes_expected_arguments_to_provider():
    CONTRACT.mentions(
        "megatron.bridge.training.utils.flop_utils",
        "num_floating_point_operations",
        NAME,
        *ARGUMENTS,
    )


def test_counts_operations_mixin_calls_operations_of_step():
    from qwen3vl_bridge.upstream.provider_flops import CountsOperations

    class Provider(CountsOperations):
        def operations_of_step(self, **statistics):
            return statistics

    assert getattr(Provider(), NAME)(batch_size=2) == {"batch_size": 2}


def test_operations_of_step_has_parameters_that_megatron_bridge_passes():
    from qwen3vl_bridge.models.common.provider import VisionLanguageProvider

    parameters = [*inspect.signature(VisionLanguageProvider.operations_of_step).parameters]
    assert tuple(parameters[1:]) == ARGUMENTS
