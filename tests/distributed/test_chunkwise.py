"""Qwen3.5 with chunk-wise context parallelism of linear attention trains as transformers does in one process."""

import pytest

from tests.models.qwen3_5.tiny import make_checkpoint
from tests.parity.matrix import MODELS, Case, cases, check, with_references
from tests.parity.topologies import CHUNKWISE

HEADS = dict(linear_num_key_heads=2, linear_num_value_heads=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, models = tmp_path_factory.mktemp("chunkwise"), MODELS["qwen3_5"]
    made = {name: make_checkpoint(folder / name, **options, **HEADS) for name, options in models.options.items()}
    return with_references(made, folder / "references", ["mixed", "video"], **models.settings)


def chosen(ranks: int) -> list[Case]:
    """Return two cases of each topology on `ranks` ranks: packed rows and other rows, of one family by turns."""
    every = [case for case in cases(ranks, CHUNKWISE) if case[2] in ("mixed", "video")]
    found = []
    for turn, name in enumerate(dict.fromkeys(case[1] for case in every)):
        own = [case for case in every if case[1] == name]
        family = own[0][0] if turn % 2 else own[-1][0]
        other = ("padded", "presharded")[turn % 2]
        found += [(family, name, "mixed", "packed"), (family, name, "video", other)]
    return found


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_chunkwise_cp_trains_as_transformers_in_one_process(folders, ranks):
    check(chosen(ranks), *folders, ranks)


def test_chunkwise_cases_cover_every_topology_family_and_row_format():
    every = [case for ranks in (2, 4, 8) for case in chosen(ranks)]
    assert {case[1] for case in every} == set(CHUNKWISE)
    assert {case[0] for case in every} == {"dense", "MoE"} and {case[3] for case in every} == {
        "packed", "padded", "presharded"
    }  # fmt: skip
