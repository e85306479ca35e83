"""However a model is split over ranks, it trains as transformers does in one process: some cases of the matrix.

Multi-token prediction is trained along, against a reference of transformers' parts.
"""

from __future__ import annotations

import pytest

from tests.parity.matrix import run, some_cases, table, write_references

# As `tests.parity.matrix.LIMITS`, wider by what linear attention multiplies rounding errors by, which `test_parity.py`
# measures. Measured worst of 26 cases: loss 1.2e-6, gradient 2.6e-4, norm 2.6e-4, weight 3.7e-2 of a learning rate.
LIMITS = {"gradient": 6e-4, "loss": 4e-6, "grad_norm": 1e-3, "weight": 1e-1}
CHOSEN = {2: dict(each=1, both=False), 4: dict(each=1, both=False)}


@pytest.fixture(scope="module")
def folders(qwen3_5_folders):
    folders = {"dense": qwen3_5_folders["dense"], "MoE": qwen3_5_folders["3.6"]}
    write_references(folders, mtp_loss_scaling_factor=0.3)
    return folders


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_models_train_as_one_process_does(folders, ranks):
    chosen = [case for case in some_cases(ranks, **CHOSEN[ranks]) if case[1] != "TP2"]  # which is refused
    found = run(chosen, folders, ranks)
    print(table(found))
    assert found.keys() == set(chosen)
    wrong = {
        case: errors for case, errors in found.items() if any(not errors[k] <= LIMITS[k] for k in LIMITS if k in errors)
    }
    assert not wrong
