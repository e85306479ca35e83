"""Every parallel layout trains as transformers does in one process: some cases of the matrix.

They include separate ranks for vision and language.
"""

from itertools import product

import pytest
import torch

from tests.parity.matrix import EACH, ERRORS, FAMILIES, Case, cases, check, some_cases, with_references, wrong
from tests.parity.references import MATRIX_CONTENTS
from tests.parity.topologies import MODULES, TOPOLOGIES

# Two cases of each topology, of both families; on four ranks one, of one family by turns, as Qwen3.5 has on two too.
CHOSEN = {2: dict(each=2, both=True), 4: dict(each=1, both=False)}
# Of modules on ranks of their own, every content and kind of rows: as many of both, and more of either.
WHOLE = {3: ("2 + 1", "1 + DP2"), 4: ("2 + DP2",)}


def of_modules(ranks: int) -> list[Case]:
    """Return all cases of some parallel layouts, and two different cases of each other layout."""
    every = cases(ranks, MODULES)
    found = [case for case in every if case[1] in WHOLE[ranks]]
    rest = [name for name in MODULES if MODULES[name].ranks == ranks and name not in WHOLE[ranks]]
    for turn, name in enumerate(rest):
        own = [case for case in every if case[1] == name]
        found += [own[(5 * turn + 2) % len(own)], own[(5 * turn + 2 + len(own) // 2) % len(own)]]
    return found


@pytest.fixture(scope="module")
def models(untied_folder, moe_folder):
    return {"dense": untied_folder, "MoE": moe_folder}


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    return with_references(models, tmp_path_factory.mktemp("references"))


def test_training_with_each_parallelism_matches_transformers(models, tmp_path):
    check(EACH, *with_references(models, tmp_path, ["mixed"]), ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CHOSEN)
def test_training_with_combined_parallelism_matches_transformers(folders, ranks):
    check(some_cases(ranks, **CHOSEN[ranks]), *folders, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", list(WHOLE))
def test_training_with_separate_vision_ranks_matches_transformers(folders, ranks):
    check(of_modules(ranks), *folders, ranks)


def test_selected_cases_cover_every_topology_and_batch_format():
    everything = cases(2) + cases(4)
    chosen = [case for ranks, how in CHOSEN.items() for case in some_cases(ranks, **how)]
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(everything)
    assert {case[1] for case in chosen} == {case[1] for case in everything}
    assert {case[:2] for case in some_cases(2, **CHOSEN[2])} == {case[:2] for case in cases(2)}
    assert {case[0] for case in some_cases(4, **CHOSEN[4])} == {"dense", "MoE"}
    assert {case[2:] for case in chosen} == {case[2:] for case in everything}
    assert {case[1] for case in everything} == set(TOPOLOGIES)
    assert {case[2] for case in everything} == set(MATRIX_CONTENTS)
    assert set(EACH) <= set(everything)


def test_cases_with_separate_vision_ranks_cover_every_parallel_layout():
    every = [case for ranks in WHOLE for case in of_modules(ranks)]
    assert len(every) == len(set(every))
    assert {case[1] for case in every} == {name for name, split in MODULES.items() if split.ranks in WHOLE}
    for name in (name for names in WHOLE.values() for name in names):
        whole = {(family, name, *rest) for family, *rest in product(FAMILIES, MATRIX_CONTENTS, ("padded", "packed"))}
        assert {case for case in every if case[1] == name} == whole


def test_comparison_reports_case_with_nan_error_as_failed():
    good, limits = dict.fromkeys(ERRORS, 0.0), dict.fromkeys(("dense", "MoE"), dict.fromkeys(ERRORS, 1.0))
    found = {("dense", "TP2", "image", "packed"): good, ("MoE", "TP2", "image", "packed"): good | {"loss": torch.nan}}
    assert list(wrong(found, limits)) == [("MoE", "TP2", "image", "packed")]
