"""Megatron-FSDP's first gradients are transformers', and context parallelism of 1 and of 4 are the same training."""

from __future__ import annotations

import pytest
import torch

from tests.forked import run_ranks
from tests.parity.conftest import make_pair
from tests.parity.split_models.cp_check_on_ranks import RANKS
from tests.parity.split_models.test_cp_check import check_sizes
from tests.parity.split_models.test_fsdp import check_models, run_models

from ..tiny import with_mtp

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
    check_models(pair, folders[kind], losses, gradients)


@pytest.fixture(scope="module")
def of_sizes(folders, tmp_path_factory):
    output = tmp_path_factory.mktemp("cp_check") / "found.pt"
    run_ranks("tests.parity.split_models.cp_check_on_ranks", RANKS, output, *folders.values())
    return torch.load(output)


@pytest.mark.parametrize("kind", ["dense", "MoE"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "other lengths"])
def test_context_parallelism_of_one_and_of_four(of_sizes, kind, equal):
    """Rows and packed rows; linear attention's heads are shared out over ranks."""
    check_sizes(of_sizes, kind, equal)
