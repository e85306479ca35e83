"""Checkpoints in megatron-core's own format: weights saved at one split of a model load at another, bit for bit."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_ranks
from tests.model.checkpoints.test_torch_dist import build_chunks, save, wrong_after_loading
from tests.parity.topologies import TOPOLOGIES

RANKS = 4  # for those that need fewer, the others hold the same as data-parallel ranks
KINDS = {"dense": ("untied", "tied"), "MoE": ("mixed", "experts")}
# 512 rows become 600, and 600 rows 512 again.
PADDED = dict(TOPOLOGIES["TP2+SP"].fields, should_pad_vocab=True, make_vocab_size_divisible_by=300)

Stop = tuple[str, str, dict[str, Any]]


def splits() -> dict[str, tuple[tuple[str, ...], dict[str, Any]]]:
    """The kinds of models and the fields of every way to split one that places weights in another way."""
    found: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}
    for name, topology in TOPOLOGIES.items():
        kinds = tuple(itertools.chain(*(KINDS[family] for family in topology.families)))
        if (kinds, topology.fields) not in found.values():  # optimizers are not saved here
            found[name] = kinds, topology.fields
    return found | {"TP2+SP, padded vocabulary": (sum(KINDS.values(), ()), PADDED)}


def stops(*, all_kinds: bool) -> list[Stop]:
    """[kind, name, fields], all kinds at each split, or the one that has been to the fewest."""
    chosen: list[Stop] = []
    for name, (kinds, fields) in splits().items():
        been = Counter(kind for kind, _, _ in chosen)
        chosen += [(kind, name, fields) for kind in (kinds if all_kinds else [min(kinds, key=been.__getitem__)])]
    return chosen


def travel(chosen: list[Stop], folders: dict[str, Path], saved: dict[str, Path], scratch: Path) -> dict[str, Path]:
    """Load at each stop what was saved at the kind's last one, compare all weights with the folder's, save."""
    cases, last = [], dict(saved)
    for number, (kind, _, fields) in enumerate(chosen):
        save = scratch / f"{number}_{kind}"
        by_bridge = sum(other == kind for other, _, _ in chosen[number + 1 :]) % 2 == 1  # the last by megatron-core
        cases.append(dict(folder=folders[kind], fields=fields, load=last[kind], save=save, by_bridge=by_bridge))
        last[kind] = save
    run_ranks("tests.model.checkpoints.torch_dist_on_ranks", RANKS, json.dumps(cases, default=str))
    return last


pytestmark = pytest.mark.slow


def test_every_tensor_comes_back_from_a_journey(folders, tmp_path):
    saved = {kind: tmp_path / kind for kind in folders}
    for kind, folder in folders.items():
        save(*build_chunks(folder), saved[kind])
    last = travel(stops(all_kinds=False), folders, saved, tmp_path)
    for kind, folder in folders.items():
        assert last[kind] != saved[kind]
        assert wrong_after_loading(*build_chunks(folder), last[kind]) == []


def test_the_stops_are_every_split_and_every_kind():
    some, everything = stops(all_kinds=False), stops(all_kinds=True)
    assert {name for _, name, _ in some} == {name for _, name, _ in everything} == splits().keys()
    fields = [fields for _, fields in splits().values()]
    assert all(topology.fields in fields for topology in TOPOLOGIES.values())
    assert len(everything) == sum(len(kinds) for kinds, _ in splits().values())
    counts = Counter(kind for kind, _, _ in some)
    assert counts.keys() == set(sum(KINDS.values(), ())) and min(counts.values()) >= 4
