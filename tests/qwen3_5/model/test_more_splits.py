"""Megatron-FSDP's first gradients are transformers', and context parallelism of 1 and of 4 are the same training."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.forked import run_ranks
from tests.parity.conftest import make_pair
from tests.parity.split_models.cp_check_on_ranks import RANKS, SIZES
from tests.parity.split_models.test_fsdp import run_models, worst_gradient

from ..tiny import with_mtp

GRADIENT = 3e-4  # relative to the largest entry of each; measured 7.2e-5
AGREE = {"loss": 3e-7, "grad_norm": 5e-7}  # relative; measured 7.1e-8 and 1.2e-7

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(qwen3_5_folders):
    return {"dense": qwen3_5_folders["dense"], "MoE": qwen3_5_folders["3.6"]}


@pytest.fixture(scope="module")
def of_fsdp(folders, tmp_path_factory):
    return run_models(tmp_path_factory.mktemp("fsdp") / "found", *folders.values())


@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_megatron_fsdp(of_fsdp, kind, folders):
    *losses, gradients, _ = of_fsdp
    pair = make_pair(folders[kind], **(dict(moe_aux_loss_coeff=0.0) if kind == "MoE" else {}))
    with_mtp(pair.reference, folders[kind])
    worst = worst_gradient(pair, folders[kind], losses, gradients)
    print(f"{kind}: {worst:.1e}")
    assert worst <= GRADIENT


@pytest.fixture(scope="module")
def of_sizes(folders, tmp_path_factory):
    output = tmp_path_factory.mktemp("cp_check") / "found.pt"
    run_ranks("tests.parity.split_models.cp_check_on_ranks", RANKS, output, *folders.values())
    return torch.load(output)


@pytest.mark.parametrize("kind", ["dense", "MoE"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "other lengths"])
def test_context_parallelism_of_one_and_of_four(of_sizes, kind, equal):
    """Rows and packed rows; linear attention's heads are shared out over ranks."""
    logs = [of_sizes[size, kind, equal, rows] for size, rows in itertools.product(SIZES, ("BSHD", "THD"))]
    for name, limit in AGREE.items():
        values = [log[name] for log in logs]
        worst = max(abs(value / values[0] - 1) for value in values)
        print(f"{kind}, equal {equal}: {name} {worst:.1e}")
        assert worst <= limit
