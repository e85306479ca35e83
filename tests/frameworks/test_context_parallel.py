"""Frameworks call a context-parallel model each in its own way; what comes back is this rank's part of the truth."""

from __future__ import annotations

import pytest
import torch

from tests.forked import run_ranks

from .support import LOG_PROBS

CALLS = [
    ("verl", "without padding"),
    ("verl", "without padding, pad_to_length"),
    ("verl", "one sample"),
    ("miles", "a share with a loss mask"),
    ("ms_swift", "labels are cut"),
]


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("calls") / "found.pt"
    run_ranks("tests.frameworks.calls_on_ranks", 2, output, untied_folder, moe_folder, timeout=500)
    return torch.load(output)


@pytest.mark.parametrize("family", ["dense", "MoE"])
@pytest.mark.parametrize(("caller", "call"), CALLS, ids=", ".join)
def test_it_is_given_its_part(found, caller, call, family):
    error = found[caller, call, family]
    print(error)
    assert isinstance(error, float), error
    assert error <= LOG_PROBS


@pytest.mark.parametrize("family", ["dense", "MoE"])
def test_positions_that_are_cut_while_tokens_are_whole_are_refused(found, family):
    """As ms-swift cuts them; the message says that None derives them."""
    said = found["ms_swift", "labels and positions are cut", family]
    assert isinstance(said, str) and "expected [3, 1, 84]" in said and "None to derive them" in said, said
