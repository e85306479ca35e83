"""Names of megatron-core that upstream/weight_gradients.py reads."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("weight_gradients")
LAYERS = "megatron.core.tensor_parallel.layers"


def test_column_parallel_linear_reads_gradient_fusion_flag():
    CONTRACT.find(LAYERS, "_grad_accum_fusion_available", bool)
    CONTRACT.mentions(LAYERS, "ColumnParallelLinear", "_grad_accum_fusion_available")


@pytest.mark.parametrize("available", [True, False])
def test_output_layer_fuses_function_returns_megatron_core_flag(available, monkeypatch):
    from qwen3vl_bridge.upstream.weight_gradients import output_layer_fuses

    monkeypatch.setattr(f"{LAYERS}._grad_accum_fusion_available", available)
    assert output_layer_fuses() is available
