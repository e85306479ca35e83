"""However a model with experts is split, its balancing loss weighs tokens as in one process, and padding not at all."""

import torch

from tests.forked import run_ranks

from .balancing_on_ranks import ROWS
from .topologies import TOPOLOGIES

GRADIENT = 2e-5  # relative to the largest entry of each


def test_gradients_are_those_of_one_process(moe_folder, tmp_path):
    run_ranks("tests.parity.balancing_on_ranks", 1, tmp_path / "one", moe_folder)
    run_ranks("tests.parity.balancing_on_ranks", 2, tmp_path / "two", moe_folder, tmp_path / "one")
    found = torch.load(tmp_path / "two")
    print({case: f"{error:.1e}" for case, error in found.items()})
    assert {name for name, _ in found} >= {"CP2", "TP2+SP", "PP2", "DP2", "EP2", "TP2+SP+EP2"} & TOPOLOGIES.keys()
    assert {rows for _, rows in found} == set(ROWS)
    assert max(found.values()) <= GRADIENT, found
