"""Checkpoints that wander from one way to split a model to the next: the stops, and the journey."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.forked import run_ranks
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
