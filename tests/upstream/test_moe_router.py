"""Names of megatron-core that upstream/moe_router.py overrides."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("moe_router")
ROUTER = "megatron.core.transformer.moe.router"
LOSSES = ("_apply_aux_loss", "_apply_global_aux_loss")


@pytest.mark.parametrize("name", LOSSES)
def test_router_load_balancing_loss_has_expected_parameters(name):
    CONTRACT.takes(
        ROUTER, f"TopKRouter.{name}", "self", "probs", "scores_for_aux_loss", "routing_map", "with_padding_mask"
    )


@pytest.mark.parametrize("name", LOSSES)
def test_router_routing_calls_load_balancing_loss(name):
    CONTRACT.mentions(ROUTER, "TopKRouter.routing", name)


def test_balancing_router_private_losses_call_its_public_methods():
    from qwen3vl_bridge.upstream.moe_router import BalancingRouter

    class Router(BalancingRouter):
        def balance_microbatch(self, probs, scores, routing_map):
            return "microbatch", probs, scores, routing_map

        def balance_global_batch(self, probs, scores, routing_map):
            return "global batch", probs, scores, routing_map

    router = Router.__new__(Router)
    for name, kind in zip(LOSSES, ("microbatch", "global batch"), strict=True):
        assert getattr(router, name)(1, 2, 3, with_padding_mask=True) == (kind, 1, 2, 3)
