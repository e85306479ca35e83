"""However a model with experts is split, its balancing loss weighs tokens as in one process, and padding not at all.

Also where a microbatch has no real token, and where losses are divided by microbatches, as by verl and miles.
"""

import pytest
import torch

from tests.forked import run_ranks

from ..topologies import TOPOLOGIES
from .balancing_on_ranks import EMPTY, KINDS, ROWS

pytestmark = pytest.mark.slow

GRADIENT = 2e-5  # relative to the largest entry of each


def test_gradients_are_those_of_one_process(moe_folder, tmp_path):
    run_ranks("tests.parity.split_models.balancing_on_ranks", 1, tmp_path / "one", moe_folder)
    run_ranks("tests.parity.split_models.balancing_on_ranks", 2, tmp_path / "two", moe_folder, tmp_path / "one")
    found = torch.load(tmp_path / "two")
    print({case: f"{error:.1e}" for case, error in found.items()})
    assert {name for name, *_ in found} >= {"CP2", "TP2+SP", "PP2", "DP2", "EP2", "TP2+SP+EP2"} & TOPOLOGIES.keys()
    assert {(kind, rows) for _, kind, rows in found} >= {(k, r) for k in list(KINDS)[:2] for r in (*ROWS, EMPTY)}
    assert all(error <= GRADIENT for error in found.values()), found


def test_a_microbatch_without_a_real_token_has_no_gradient(moe_folder):
    """Nothing is left of it but zeros, in either kind of load balancing."""
    from ..conftest import make_pair

    for kind in ("aux_loss", "global_aux_loss"):
        pair = make_pair(moe_folder, moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.5)
        layer = pair.megatron.decoder.layers[-1].mlp
        hidden = torch.randn(6, 1, pair.provider.hidden_size, requires_grad=True)
        probabilities, chosen = layer.router(hidden, padding_mask=torch.ones(6, 1, dtype=torch.bool))
        (probabilities * 0).sum().backward()
        assert chosen.sum() == 6 * pair.provider.moe_router_topk  # they go to experts all the same
        assert torch.equal(layer.router.weight.grad, torch.zeros_like(layer.router.weight))
