"""Context parallelism of 1 and of 4 are the same training, for padded rows and for packed ones."""

import itertools

import pytest
import torch

from tests.forked import run_ranks

from .cp_check_on_ranks import RANKS, SIZES

# Relative, to the first of the values that should be one.
LOSS = 3e-7  # measured 8.0e-8
NORM = 5e-7  # measured 1.3e-7


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("cp_check") / "found.pt"
    run_ranks("tests.parity.split_models.cp_check_on_ranks", RANKS, output, untied_folder, moe_folder)
    return torch.load(output)


@pytest.mark.parametrize("family", ["dense", "MoE"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "other lengths"])
def test_one_and_four_ranks_rows_and_packed_agree(found, family, equal):
    logs = [found[size, family, equal, rows] for size, rows in itertools.product(SIZES, ("BSHD", "THD"))]
    first = logs[0]
    assert first["loss"] > 5 and first["grad_norm"] > 1
    for name, tolerance in (("loss", LOSS), ("grad_norm", NORM)):
        worst = max(abs(log[name] / first[name] - 1) for log in logs)
        print(family, equal, name, [log[name] for log in logs], f"{worst:.1e}")
        assert worst <= tolerance


def test_what_is_compared_tells_batches_apart(found):
    """Or losses and norms that agree would say nothing."""
    values = [found[1, family, equal, "BSHD"] for family, equal in itertools.product(("dense", "MoE"), (True, False))]
    for name in ("loss", "grad_norm"):
        for a, b in itertools.combinations([value[name] for value in values], 2):
            assert abs(a / b - 1) > 1e-3
