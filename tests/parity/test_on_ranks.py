"""However a model is split over ranks, it trains as transformers does in one process: some cases of the matrix."""

import pytest
import torch

from .matrix import LIMITS, MATRIX_CONTENTS, TOPOLOGIES, cases, run, some_cases, table, write_references, wrong


@pytest.fixture(scope="module")
def folders(untied_folder, moe_folder):
    folders = {"dense": untied_folder, "MoE": moe_folder}
    write_references(folders)
    return folders


@pytest.mark.parametrize(("ranks", "each"), [(2, 2), (4, 1)])
def test_split_models_train_as_one_process_does(folders, ranks, each):
    chosen = some_cases(ranks, each)
    found = run(chosen, folders, ranks)
    print(table(found))
    assert found.keys() == set(chosen)
    assert not wrong(found)


def test_the_chosen_cases_have_every_topology_content_and_kind_of_rows():
    everything = cases(2) + cases(4)
    chosen = some_cases(2, 2) + some_cases(4, 1)
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(everything)
    assert {case[:2] for case in chosen} == {case[:2] for case in everything}
    assert {case[2:] for case in chosen} == {case[2:] for case in everything}
    assert {case[1] for case in everything} == set(TOPOLOGIES)
    assert {case[2] for case in everything} == set(MATRIX_CONTENTS)


def test_an_error_that_is_no_number_is_too_large():
    good = dict.fromkeys(LIMITS, 0.0)
    found = {("dense", "TP2", "image", "packed"): good, ("MoE", "TP2", "image", "packed"): good | {"loss": torch.nan}}
    assert list(wrong(found)) == [("MoE", "TP2", "image", "packed")]
