"""torch's record of allocations."""

import inspect
import traceback
from typing import Any

import pytest
import torch

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("torch_memory")
MEMORY = "torch.cuda.memory"


def test_record_memory_history_has_expected_parameters():
    found = inspect.signature(CONTRACT.find(MEMORY, "_record_memory_history")).parameters.keys()
    if not found >= {"enabled", "stacks", "max_entries"}:
        CONTRACT.fail(MEMORY, f"_record_memory_history takes {', '.join(found)}: without stacks or max_entries")
    CONTRACT.mentions(MEMORY, "_snapshot", "device_traces")


def test_stack_of_backward_pass_contains_engine_run_backward():
    CONTRACT.find("torch.autograd.graph", "_engine_run_backward")
    from qwen3vl_bridge.upstream.torch_memory import is_in_backward_pass

    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append([{"name": frame.name} for frame in traceback.extract_stack()])
            return 2 * grad

    Product.apply(torch.ones(1, requires_grad=True)).backward()
    if not is_in_backward_pass(seen[0]):
        CONTRACT.fail("torch.autograd.graph", f"stacks of a backward pass have {[one['name'] for one in seen[0]]}")
