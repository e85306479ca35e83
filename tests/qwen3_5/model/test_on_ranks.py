"""However a model is split over ranks, it trains as transformers does in one process: some cases of the matrix.

Multi-token prediction is trained along, against a reference of transformers' parts. Megatron-FSDP's first gradients are
transformers', and context parallelism of 1 and of 4 are the same training.
"""

from __future__ import annotations

import shutil

import pytest

from tests.forked import results_of_ranks
from tests.parity.conftest import make_pair
from tests.parity.matrix import MODELS, check, some_cases, write_references
from tests.parity.split_models.test_cp_check import RANKS, check_sizes
from tests.parity.split_models.test_fsdp import check_models, run_models

from ..tiny import with_mtp

MATRIX = MODELS["qwen3_5"]


@pytest.fixture(scope="module")
def both(qwen3_5_folders):
    return {"dense": qwen3_5_folders["dense"], "MoE": qwen3_5_folders["3.6"]}


@pytest.fixture(scope="module")
def folders(both, tmp_path_factory):
    copies = tmp_path_factory.mktemp("references")  # which are written next to the models
    folders = {name: shutil.copytree(folder, copies / name) for name, folder in both.items()}
    return folders, write_references(folders, **MATRIX.settings)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_models_train_as_one_process_does(folders, ranks):
    chosen = [case for case in some_cases(ranks, each=1, both=False) if case[1] not in MATRIX.refused]
    check(chosen, *folders, ranks)


@pytest.fixture(scope="module")
def of_fsdp(both, tmp_path_factory):
    return run_models(tmp_path_factory.mktemp("fsdp") / "found", *both.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_megatron_fsdp(of_fsdp, kind, both):
    *losses, gradients, _ = of_fsdp
    pair = make_pair(both[kind], **(dict(moe_aux_loss_coeff=0.0) if kind == "MoE" else {}))
    with_mtp(pair.reference, both[kind])
    check_models(pair, both[kind], losses, gradients)


@pytest.fixture(scope="module")
def of_sizes(both):
    return results_of_ranks("tests.parity.split_models.test_cp_check", RANKS, *both.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "MoE"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "other lengths"])
def test_context_parallelism_of_one_and_of_four(of_sizes, kind, equal):
    """Rows and packed rows; linear attention's heads are shared out over ranks."""
    check_sizes(of_sizes, kind, equal)
