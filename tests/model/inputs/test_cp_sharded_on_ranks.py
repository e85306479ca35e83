"""Rows that context-parallel ranks have shared out already give the losses, logits and gradients of transformers."""

import pytest
import torch

from tests.forked import run_ranks

from .cp_sharded_on_ranks import CALLS, SEEDS, TOPOLOGIES

# Of logits up to about 2 and losses of about 6, absolute; of each gradient, relative to its largest entry.
TOLERANCES = {
    "logits": 1e-5,  # measured 2.3e-6
    "losses": 1e-5,  # measured 1.4e-6
    "gradients": 2e-5,  # measured 3.6e-6
    "whole": 0.0,  # measured 0: from the same row on, all is the same
}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.slow if n > 2 else ()) for n in TOPOLOGIES])
def test_shares_give_what_the_whole_row_gives(untied_folder, moe_folder, tmp_path, ranks):
    run_ranks(
        "tests.model.inputs.cp_sharded_on_ranks", ranks, tmp_path / "found.pt", untied_folder, moe_folder, timeout=1500
    )
    found, refused = torch.load(tmp_path / "found.pt")

    assert len(found) == len(TOPOLOGIES[ranks]) * 2 * len(SEEDS) * (1 + len(CALLS))
    for name in TOPOLOGIES[ranks]:
        cases = [errors for key, errors in found.items() if key[0] == name]
        worst = {kind: max(errors.get(kind, 0.0) for errors in cases) for kind in TOLERANCES}
        print(name, " ".join(f"{kind} {error:.1e}" for kind, error in worst.items()))
    for key, errors in found.items():
        for kind, error in errors.items():
            assert error <= TOLERANCES[kind], (key, kind, error)

    assert len(refused) == len(TOPOLOGIES[ranks]) * 2 * ranks
    for other_arguments, wrong_labels, other_offsets in refused:
        assert "labels is None on context-parallel rank 1" in other_arguments
        assert "labels has shape" in wrong_labels and "token ids below 512" in wrong_labels
        assert "packed_seq_params of context-parallel rank 1 has other segments" in other_offsets
