"""Names of torch that upstream/dynamic_shapes.py calls."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("dynamic_shapes")


def test_maybe_mark_dynamic_has_parameters_for_tensor_and_dimension():
    newer = ("min", "max") if CONTRACT.has_parameter("torch._dynamo", "maybe_mark_dynamic", "min") else ()  # torch 2.15
    CONTRACT.takes("torch._dynamo", "maybe_mark_dynamic", "t", "index", *newer)


def test_function_compiles_once_for_three_sizes_after_mark_dynamic():
    from qwen3vl_bridge.upstream.dynamic_shapes import mark_dynamic

    graphs = []
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for size in (3, 5, 9):
        x = torch.zeros(size, 2)
        mark_dynamic(x, 0)
        compiled(x)
    assert len(graphs) == 1
