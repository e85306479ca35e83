"""However a model is split over ranks, it trains as transformers does in one process: some cases of the matrix."""

import shutil

import pytest
import torch

from ..matrix import ERRORS, MATRIX_CONTENTS, TOPOLOGIES, cases, run, some_cases, table, write_references, wrong

# One case of each topology, of one family by turns; Qwen3.5's are as many (`tests/qwen3_5/model/test_on_ranks.py`).
FEW = dict(each=1, both=False)
CHOSEN = {2: dict(each=2, both=True), 4: FEW}


@pytest.fixture(scope="module")
def folders(untied_folder, moe_folder, tmp_path_factory):
    copies = tmp_path_factory.mktemp("references")  # which are written next to the models
    folders = {"dense": untied_folder, "MoE": moe_folder}
    folders = {name: shutil.copytree(folder, copies / name) for name, folder in folders.items()}
    return folders, write_references(folders)


@pytest.mark.parametrize(
    ("ranks", "how"), [(2, FEW), *(pytest.param(*chosen, marks=pytest.mark.slow) for chosen in CHOSEN.items())]
)
def test_split_models_train_as_one_process_does(folders, ranks, how):
    (places, limits), chosen = folders, some_cases(ranks, **how)
    found = run(chosen, places, ranks)
    print(table(found), limits)
    assert found.keys() == set(chosen)
    assert not wrong(found, limits)


def test_the_chosen_cases_have_every_topology_content_and_kind_of_rows():
    everything = cases(2) + cases(4)
    chosen = [case for ranks, how in CHOSEN.items() for case in some_cases(ranks, **how)]
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(everything)
    assert {case[1] for case in chosen} == {case[1] for case in everything}
    assert {case[:2] for case in some_cases(2, **CHOSEN[2])} == {case[:2] for case in cases(2)}
    assert {case[0] for case in some_cases(4, **CHOSEN[4])} == {"dense", "MoE"}
    assert {case[2:] for case in chosen} == {case[2:] for case in everything}
    assert {case[1] for case in everything} == set(TOPOLOGIES)
    assert {case[2] for case in everything} == set(MATRIX_CONTENTS)


def test_an_error_that_is_no_number_is_too_large():
    good, limits = dict.fromkeys(ERRORS, 0.0), dict.fromkeys(("dense", "MoE"), dict.fromkeys(ERRORS, 1.0))
    found = {("dense", "TP2", "image", "packed"): good, ("MoE", "TP2", "image", "packed"): good | {"loss": torch.nan}}
    assert list(wrong(found, limits)) == [("MoE", "TP2", "image", "packed")]
