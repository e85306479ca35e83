"""A plugin of pytest, `-p tests.fake_gpu.without_values`: tests run whole though the fake GPU computes no value.

Tests' assertions are left out; those of other packages stay. Transformers' models, whose steps depend on what they
compute, run on the host; the guard lets every step pass; routers give each expert as many tokens.
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
    from qwen3vl_bridge.batch import TokenBatch

_TESTS = str(Path(__file__).resolve().parents[1])
_get_code = SourceFileLoader.get_code


def _without_asserts(loader: SourceFileLoader, fullname: str) -> CodeType | None:
    path = loader.get_filename(fullname)
    if not path.startswith(_TESTS):
        return _get_code(loader, fullname)
    return compile(loader.get_data(path), path, "exec", dont_inherit=True, optimize=1)


SourceFileLoader.get_code = _without_asserts


def stand_ins() -> ExitStack:
    """For what reads values: entered, to be closed."""
    from qwen3vl_bridge.rehearsal.no_cudnn import without_cudnn
    from qwen3vl_bridge.rehearsal.one_rank import balance_routing
    from qwen3vl_bridge.training.guard import StepGuard

    from megatron.core.optimizer import optimizer

    from tests.parity.conftest import Pair, Results
    from tests.parity.one_process import test_parity

    on_device, run_megatron, norm = Pair.reference_results, test_parity.run_megatron, optimizer.get_grad_norm_fp32

    def on_host(pair: Pair, samples: list[Any]) -> Results:
        pair.reference.cpu()
        return on_device(pair, samples)

    def copied(pair: Pair, batch: TokenBatch) -> Results:
        found = run_megatron(pair, batch)
        return found._replace(logits=[logits.cpu() for logits in found.logits])

    def allow(guard: StepGuard, *, overflow: bool) -> bool:
        if guard._figures is not None:
            guard._figures.tolist()  # the host waits, and what it gets is no sum
            guard._figures, guard._loss = None, (1.0, 1.0)
        return True

    stack = ExitStack()
    stack.enter_context(without_cudnn())
    balance_routing()
    stack.enter_context(mock.patch.object(Pair, "reference_results", on_host))
    stack.enter_context(mock.patch.object(test_parity, "run_megatron", copied))
    stack.enter_context(mock.patch.object(StepGuard, "_judge", allow))
    # A root, which is complex where what is read is below zero.
    stack.enter_context(mock.patch.object(optimizer, "get_grad_norm_fp32", lambda *a, **k: abs(norm(*a, **k))))
    return stack


@pytest.fixture(scope="session", autouse=True)
def _stand_ins():
    with stand_ins():
        yield
