"""The text model alone, split or not: megatron-core embeds and scatters, and nothing is scattered twice."""

import pytest
import torch

from tests.forked import run_ranks

from .language_model_on_ranks import SPLITS

LOSS = 5e-6  # absolute, measured 9.5e-7 of losses up to 8
GRADIENT = 1e-5  # relative to the largest entry of each gradient, measured 1.3e-6


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("language_model") / "found.pt"
    run_ranks("tests.parity.split_models.language_model_on_ranks", 2, output, untied_folder, moe_folder)
    return torch.load(output)


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize(("family", "split"), [(family, split) for family in SPLITS for split in SPLITS[family]])
def test_it_is_the_same_model(found, family, split, rows):
    errors = found[family, split, rows]
    print(family, split, rows, {name: f"{error:.1e}" for name, error in errors.items()})
    assert errors["loss"] <= LOSS and errors["gradient"] <= GRADIENT
    assert errors["masks"] == 0
    assert errors["inside_loss"] == errors["inside_gradient"] == 0.0
