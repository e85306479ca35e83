"""Counters of FLOPs: Megatron-Bridge resets what we add, and computes its metrics from it."""

from types import SimpleNamespace

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("flops_counters")
FLOPS, TRAIN = "megatron.bridge.training.utils.flop_utils", "megatron.bridge.training.train"
COUNTERS = (
    *("_flops_seqlen_sum", "_flops_seqlen_sq_sum", "_flops_vision_patches", "_flops_cross_seqlen_sum"),
    *("_flops_cross_seqlen_product_sum", "_flops_requires_global_reduce"),
)


def test_megatron_bridge_training_loop_uses_flops_counters_that_we_set():
    CONTRACT.mentions(TRAIN, "train", *COUNTERS)
    CONTRACT.mentions(FLOPS, "resolve_global_flops_runtime_stats", *COUNTERS)


def test_add_operations_called_twice_sums_flops_statistics():
    CONTRACT.find(FLOPS, "resolve_global_flops_runtime_stats")
    from qwen3vl_bridge.upstream.flops_counters import add_operations

    from megatron.bridge.training.utils.flop_utils import resolve_global_flops_runtime_stats

    state = SimpleNamespace()
    for _ in range(2):
        add_operations(state, tokens=1, token_pairs=2, patches=3, cross_tokens=4, cross_pairs=5)
    found = resolve_global_flops_runtime_stats(state, data_parallel_size=1, include_cross_attention_stats=True)
    assert vars(state).keys() == set(COUNTERS)
    if not isinstance(found, tuple):  # since megatron-bridge 0.7
        names = ("seqlen_sum", "seqlen_squared_sum", "num_vision_patches", "cross_seqlen_sum")
        found = tuple(getattr(found, name) for name in (*names, "cross_seqlen_product_sum"))
    if found != (2, 4, 6, 8, 10):
        CONTRACT.fail(FLOPS, f"two microbatches give {found}, expected (2, 4, 6, 8, 10)")
