"""Pytest plugin that runs tests on the fake GPU, which computes nothing: `-p tests.simulation.fake_gpu.without_values`.

Assertions of tests are removed; those of other packages stay. Models of transformers run on the host, because their
control flow depends on values. The guard accepts every step, and routers balance experts.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

if TYPE_CHECKING:
    from qwen3vl_bridge.core.batch import TokenBatch

_TESTS = str(Path(__file__).resolve().parents[2])
_get_code = SourceFileLoader.get_code


def _without_asserts(loader: SourceFileLoader, fullname: str) -> CodeType | None:
    path = loader.get_filename(fullname)
    if not path.startswith(_TESTS):
        return _get_code(loader, fullname)
    return compile(loader.get_data(path), path, "exec", dont_inherit=True, optimize=1)


SourceFileLoader.get_code = _without_asserts


def replace_functions_that_read_values() -> ExitStack:
    """Replace functions that read values, until the returned stack is closed."""
    from qwen3vl_bridge.simulation.no_cudnn import without_cudnn
    from qwen3vl_bridge.training.guard import StepGuard
    from qwen3vl_bridge.upstream.simulated_gpu import balance_routing

    from megatron.core.optimizer import optimizer

    from tests.parity import test_parity
    from tests.parity.conftest import Pair, Results

    on_device, run_megatron, norm = Pair.reference_results, test_parity.run_megatron, optimizer.get_grad_norm_fp32

    def on_host(pair: Pair, samples: list[Any]) -> Results:
        pair.reference.cpu()
        return on_device(pair, samples)

    def copied(pair: Pair, batch: TokenBatch) -> Results:
        found = run_megatron(pair, batch)
        return found._replace(logits=[logits.cpu() for logits in found.logits])

    def allow(guard: StepGuard, *, overflow: bool) -> bool:
        if guard._sums_of_step is not None:
            guard._sums_of_step.tolist()  # synchronizes; the values are garbage
            guard._sums_of_step, guard._loss = None, (1.0, 1.0)
        return True

    stack = ExitStack()
    stack.enter_context(without_cudnn())
    balance_routing()
    stack.enter_context(mock.patch.object(Pair, "reference_results", on_host))
    stack.enter_context(mock.patch.object(test_parity, "run_megatron", copied))
    stack.enter_context(mock.patch.object(StepGuard, "_accepts_step", allow))
    # A root of a negative value is complex.
    stack.enter_context(mock.patch.object(optimizer, "get_grad_norm_fp32", lambda *a, **k: abs(norm(*a, **k))))
    return stack


@pytest.fixture(scope="session", autouse=True)
def _values_are_not_read():
    with replace_functions_that_read_values():
        yield
