"""megatron-core's choice of gradients for a norm."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("gradient_norm")
OPTIMIZER = "megatron.core.optimizer.optimizer"


def test_filter_grads_for_norm_has_expected_parameters():
    CONTRACT.takes(OPTIMIZER, "MegatronOptimizer._filter_grads_for_norm", "self", "params", "param_filter")
    CONTRACT.mentions(OPTIMIZER, "MegatronOptimizer.get_grads_for_grad_norm", "_filter_grads_for_norm")
