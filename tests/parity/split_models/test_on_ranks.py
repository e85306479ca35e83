"""However a model is split over ranks, it trains as transformers does in one process: some cases of the matrix.

Vision and language on ranks of their own among them.
"""

from __future__ import annotations

import shutil
from itertools import product

import pytest
import torch

from ..matrix import ERRORS, FAMILIES, Case, cases, check, some_cases, write_references, wrong
from ..references import MATRIX_CONTENTS
from ..topologies import MODULES, TOPOLOGIES

# One case of each topology, of one family by turns; Qwen3.5's are as many (`tests/qwen3_5/model/test_parity.py`).
FEW = dict(each=1, both=False)
CHOSEN = {2: dict(each=2, both=True), 4: FEW}
# Of modules on ranks of their own, every content and kind of rows: as many of both, and more of either.
WHOLE = {3: ("2 + 1", "1 + DP2"), 4: ("2 + DP2",)}


def of_modules(ranks: int) -> list[Case]:
    """All cases of some splits, and of each other one two, others from one to the next."""
    every = cases(ranks, MODULES)
    found = [case for case in every if case[1] in WHOLE[ranks]]
    rest = [name for name in MODULES if MODULES[name].ranks == ranks and name not in WHOLE[ranks]]
    for turn, name in enumerate(rest):
        own = [case for case in every if case[1] == name]
        found += [own[(5 * turn + 2) % len(own)], own[(5 * turn + 2 + len(own) // 2) % len(own)]]
    return found


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
    check(some_cases(ranks, **how), *folders, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", list(WHOLE))
def test_modules_on_ranks_of_their_own_train_as_one_process_does(folders, ranks):
    check(of_modules(ranks), *folders, ranks)


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


def test_the_chosen_modules_have_every_split_content_and_kind_of_rows():
    every = [case for ranks in WHOLE for case in of_modules(ranks)]
    assert len(every) == len(set(every))
    assert {case[1] for case in every} == {name for name, split in MODULES.items() if split.ranks in WHOLE}
    for name in (name for names in WHOLE.values() for name in names):
        whole = {(family, name, *rest) for family, *rest in product(FAMILIES, MATRIX_CONTENTS, ("padded", "packed"))}
        assert {case for case in every if case[1] == name} == whole


def test_an_error_that_is_no_number_is_too_large():
    good, limits = dict.fromkeys(ERRORS, 0.0), dict.fromkeys(("dense", "MoE"), dict.fromkeys(ERRORS, 1.0))
    found = {("dense", "TP2", "image", "packed"): good, ("MoE", "TP2", "image", "packed"): good | {"loss": torch.nan}}
    assert list(wrong(found, limits)) == [("MoE", "TP2", "image", "packed")]
