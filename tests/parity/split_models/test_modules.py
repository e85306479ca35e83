"""Vision and language on ranks of their own train as transformers does in one process."""

from __future__ import annotations

import shutil
from itertools import product

import pytest

from ..matrix import FAMILIES, MATRIX_CONTENTS, cases, run, table, write_references, wrong
from ..topologies import MODULES

pytestmark = pytest.mark.slow

# Every content and kind of rows: as many of both, and more of either.
WHOLE = {3: ("2 + 1", "1 + DP2"), 4: ("2 + DP2",)}


def chosen(ranks: int) -> list[tuple[str, str, str, str]]:
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


@pytest.mark.parametrize("ranks", list(WHOLE))
def test_modules_on_ranks_of_their_own_train_as_one_process_does(folders, ranks):
    places, limits = folders
    found = run(chosen(ranks), places, ranks)
    print(table(found), limits)
    assert found.keys() == set(chosen(ranks))
    assert not wrong(found, limits)


def test_the_chosen_cases_have_every_split_content_and_kind_of_rows():
    every = [case for ranks in WHOLE for case in chosen(ranks)]
    assert len(every) == len(set(every))
    assert {case[1] for case in every} == {name for name, split in MODULES.items() if split.ranks in WHOLE}
    for names in WHOLE.values():
        for name in names:
            assert {case for case in every if case[1] == name} == {
                (family, name, *rest) for family, *rest in product(FAMILIES, MATRIX_CONTENTS, ("padded", "packed"))
            }
