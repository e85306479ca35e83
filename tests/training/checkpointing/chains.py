"""Journeys of runs from split to split: the stops, and the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.forked import run_ranks
from tests.noise import SEEDS, allowed, rounded_folder

from .journeys import Journey, do_go_on

Case = tuple[str, dict[str, Any]]

# By number of ranks; a step is made at each. Megatron-FSDP's formats go on at other numbers of data-parallel ranks.
STOPS = {
    "dense": {
        2: ("TP2+SP, padded vocabulary", "PP2", "DP2", "1 + 1", "CP2"),
        3: ("1 + PP2",),
        4: ("PP2+TP2+SP", "DP2+CP2"),
    },
    "MoE": {2: ("TP2+SP+EP2", "EP2", "TP2+SP+ETP2", "CP2+EP2", "PP2+VPP2"), 3: ("TP2 + 1",), 4: ("PP2+DP2+EP2",)},
    "sharded": {2: ("DP2",)},
}


@dataclass
class Chain:
    family: str
    hf: Path
    data: Path
    save: Path
    distributed: bool = False

    @property
    def last_step(self) -> int:
        return 2 + sum(map(len, STOPS[self.family].values()))

    def limits(self, expected: list[list[float]], scratch: Path) -> dict[str, float]:
        """Of what is logged, beside a run of the whole way in one process."""
        dtype = torch.bfloat16 if self.family == "sharded" else torch.float32
        noises = []
        for seed in SEEDS[:2]:
            name = f"{self.save.name}_neighbours_{seed}"
            near = replace(self, hf=rounded_folder(self.hf, scratch / f"{name}_hf", seed, dtype))
            log = do_go_on(asdict(near.journey(None, str(scratch / name))), self.last_step)
            noises.append(errors(log, expected))
        return allowed(noises, dtype)

    def journey(self, split: str | None, save: str | None = None) -> Journey:
        place = dict(hf=str(self.hf), data=str(self.data), save=save or str(self.save))
        kind = dict(fsdp=self.family == "sharded", distributed=self.distributed)
        return Journey(**place, split=split, **kind, settings=dict(train__train_iters=self.last_step))

    def cases(self, ranks: int) -> list[Case]:
        """What `journeys` does on so many ranks."""
        return [
            ("go_on", dict(journey=asdict(self.journey(split)), count=1)) for split in STOPS[self.family].get(ranks, ())
        ]


def on_ranks(ranks: int, cases: list[Case], scratch: Path) -> list[Any]:
    """What `journeys` returns for each."""
    output = scratch / f"found_{ranks}.pt"
    run_ranks("tests.training.checkpointing.journeys", ranks, output, json.dumps(cases), timeout=1800)
    return torch.load(output)


def errors(found: list[list[float]], expected: list[list[float]]) -> dict[str, float]:
    assert [entry[0] for entry in found] == [entry[0] for entry in expected]
    return {
        name: max(abs(one[i] / other[i] - 1) for one, other in zip(found, expected, strict=True))
        for i, name in ((1, "loss"), (2, "grad_norm"))
    }


def travel(
    chains: list[Chain], scratch: Path, more: Sequence[Case] = ()
) -> tuple[list[list[list[float]]], list[tuple[dict[str, float], dict[str, float]]], list[Any]]:
    expected, found, answers = [], [], []
    for chain in chains:
        whole = chain.journey(None, str(chain.save) + "_whole")
        expected.append(do_go_on(asdict(whole), chain.last_step))
        found.append(do_go_on(asdict(chain.journey(None)), 1))
    for ranks in (2, 3, 4):
        cases = [(n, case) for n, chain in enumerate(chains) for case in chain.cases(ranks)]
        others = list(more) if ranks == 2 else []
        if not cases and not others:
            continue
        logs = on_ranks(ranks, [case for _, case in cases] + others, scratch)
        for (n, _), log in zip(cases, logs, strict=False):
            found[n] += log
        answers += logs[len(cases) :]
    for chain, log in zip(chains, found, strict=True):
        log += do_go_on(asdict(chain.journey(None)), 1)
    worst = [
        (errors(one, other), chain.limits(other, scratch))
        for chain, one, other in zip(chains, found, expected, strict=True)
    ]
    return found, worst, answers
