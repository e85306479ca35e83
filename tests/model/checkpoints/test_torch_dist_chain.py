"""Checkpoints in megatron-core's own format: weights saved at one split of a model load at another, bit for bit."""

from collections import Counter

import pytest

from tests.model.checkpoints.torch_dist_chain import KINDS, splits, stops, travel
from tests.model.checkpoints.torch_dist_models import build_chunks, save, wrong_after_loading
from tests.parity.topologies import TOPOLOGIES

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
