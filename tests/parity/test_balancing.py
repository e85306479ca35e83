"""However a model with experts is split, its balancing loss weighs tokens as in one process, and padding not at all."""

import subprocess
import sys
from pathlib import Path

import torch

from .balancing_on_ranks import ROWS
from .topologies import TOPOLOGIES

GRADIENT = 2e-5  # relative to the largest entry of each


def on_ranks(ranks: int, *arguments) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*torchrun, "-m", "tests.parity.balancing_on_ranks", *map(str, arguments)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_gradients_are_those_of_one_process(moe_folder, tmp_path):
    on_ranks(1, tmp_path / "one", moe_folder)
    on_ranks(2, tmp_path / "two", moe_folder, tmp_path / "one")
    found = torch.load(tmp_path / "two")
    print({case: f"{error:.1e}" for case, error in found.items()})
    assert {name for name, _ in found} >= {"CP2", "TP2+SP", "PP2", "DP2", "EP2", "TP2+SP+EP2"} & TOPOLOGIES.keys()
    assert {rows for _, rows in found} == set(ROWS)
    assert max(found.values()) <= GRADIENT, found
