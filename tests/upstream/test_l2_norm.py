"""megatron-core clips gradients by the norm that its module names."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("l2_norm")
MODULE = "megatron.core.optimizer.clip_grads"


def test_get_grad_norm_fp32_calls_l2_norm_impl_of_same_module():
    CONTRACT.find(MODULE, "l2_norm_impl")
    CONTRACT.mentions(MODULE, "get_grad_norm_fp32", "l2_norm_impl")
    CONTRACT.takes(
        "megatron.core.utils", "local_multi_tensor_l2_norm", "chunk_size", "noop_flag", "tensor_lists", "per_tensor",
        "*args",
    )  # fmt: skip
