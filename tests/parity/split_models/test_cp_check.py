"""Context parallelism of 1 and of 4 are the same training, for padded rows and for packed ones."""

import itertools

import pytest
import torch

from tests.forked import run_ranks
from tests.noise import SEEDS, allowed, check

from .cp_check_on_ranks import RANKS, SIZES


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("cp_check") / "found.pt"
    run_ranks("tests.parity.split_models.cp_check_on_ranks", RANKS, output, untied_folder, moe_folder)
    return torch.load(output)


def check_sizes(found, family, equal):
    """All sizes and kinds of rows give what the first does, but for the noise of that."""

    def errors(case, first):
        return {name: abs(found[case][name] / found[first][name] - 1) for name in ("loss", "grad_norm")}

    # Of both kinds of lengths together: a single number has little noise by chance.
    alone = itertools.product((1,), (family,), (True, False), ("BSHD", "THD"))
    noises = [errors((case, seed), case) for case, seed in itertools.product(alone, SEEDS[:2])]
    for size, rows in itertools.product(SIZES, ("BSHD", "THD")):
        check(errors((size, family, equal, rows), (1, family, equal, "BSHD")), allowed(noises))


@pytest.mark.parametrize("family", ["dense", "MoE"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "other lengths"])
def test_one_and_four_ranks_rows_and_packed_agree(found, family, equal):
    first = found[1, family, equal, "BSHD"]
    assert first["loss"] > 5 and first["grad_norm"] > 1
    check_sizes(found, family, equal)


def test_what_is_compared_tells_batches_apart(found):
    """Or losses and norms that agree would say nothing."""
    values = [found[1, family, equal, "BSHD"] for family, equal in itertools.product(("dense", "MoE"), (True, False))]
    for name in ("loss", "grad_norm"):
        for a, b in itertools.combinations([value[name] for value in values], 2):
            assert abs(a / b - 1) > 1e-3
