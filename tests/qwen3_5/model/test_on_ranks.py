"""However a model is split over ranks, it trains as transformers does in one process: some cases of the matrix.

Multi-token prediction is trained along, against a reference of transformers' parts.
"""

from __future__ import annotations

import shutil

import pytest

from tests.parity.matrix import MODELS, run, some_cases, table, write_references, wrong

MATRIX = MODELS["qwen3_5"]
CHOSEN = {2: dict(each=1, both=False), 4: dict(each=1, both=False)}


@pytest.fixture(scope="module")
def folders(qwen3_5_folders, tmp_path_factory):
    copies = tmp_path_factory.mktemp("references")  # which are written next to the models
    kinds = {"dense": "dense", "MoE": "3.6"}
    folders = {name: shutil.copytree(qwen3_5_folders[kind], copies / name) for name, kind in kinds.items()}
    return folders, write_references(folders, **MATRIX.settings)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_models_train_as_one_process_does(folders, ranks):
    chosen = [case for case in some_cases(ranks, **CHOSEN[ranks]) if case[1] not in MATRIX.refused]
    places, limits = folders
    found = run(chosen, places, ranks)
    print(table(found), limits)
    assert found.keys() == set(chosen)
    assert not wrong(found, limits)
