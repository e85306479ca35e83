"""Qwen3.5 with chunk-wise context parallelism of linear attention trains as in one process."""

import json

import pytest
import torch

from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import check
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.models.qwen4_exp.test_parity import own_results
from tests.parity.matrix import MODELS, run
from tests.parity.topologies import CHUNKWISE

HEADS = dict(linear_num_key_heads=2, linear_num_value_heads=4)
# Measured: 3.5e-7, 4.5e-6, 8.6e-6 of the largest entry of a gradient, 1.6e-3 of the learning rate.
LIMITS = {"loss": 1e-6, "grad_norm": 2e-5, "gradient": 3e-5, "weight": 1e-2}
# Tensor-parallel products are summed in another order. Measured: gradients 1.2e-4 of the largest entry.
OF_TENSOR_PARALLELISM = {"loss": 2e-6, "grad_norm": 5e-4, "gradient": 5e-4, "weight": 0.2}
KINDS = ("dense", "MoE")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return folders of models with the results of one process, which trains multi-token prediction too."""
    folders, models = {}, MODELS["qwen3_5"]
    for kind in KINDS:
        folder = make_checkpoint(tmp_path_factory.mktemp(kind), **models.options[kind], **HEADS)
        (folder / "provider.json").write_text(json.dumps(dict(models.settings)))
        torch.save(results_of_ranks(own_results, 1, folder), folder / "reference_mixed.pt")
        folders[kind] = folder
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_chunkwise_context_parallel_training_matches_one_process(folders, ranks):
    """Packed rows, padded rows and rows that a caller has split, with images, videos and text."""
    chosen = [
        (topology.families[turn % len(topology.families)], name, "mixed", rows)
        for turn, (name, topology) in enumerate(CHUNKWISE.items()) if topology.ranks == ranks
        for rows in ("packed", ("padded", "presharded")[turn % 2])
    ]  # fmt: skip
    found = run(chosen, folders, ranks)
    assert found.keys() == set(chosen)
    for case, errors in found.items():
        print(case)
        limits = OF_TENSOR_PARALLELISM if "TP2" in case[1] else LIMITS
        check({name: errors[name] for name in limits}, limits)
