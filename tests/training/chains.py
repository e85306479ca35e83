"""Journeys of runs from split to split: the stops, and the way.

    python -m tests.training.chains

takes every kind of model to every stop, in both formats each; the test suite takes two kinds, to each stop in one.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.forked import run_ranks

from .journeys import Journey

Case = tuple[str, dict[str, Any]]

FORMATS = ("fsdp_dtensor", "torch_dist")
# By number of ranks; a step is made at each.
STOPS = {
    "dense": {
        2: ("TP2+SP, padded vocabulary", "PP2", "DP2", "1 + 1", "CP2", "PP2+VPP2"),
        3: ("1 + PP2", "2 + 1"),
        4: ("PP2+TP2+SP", "DP2+CP2"),
    },
    "MoE": {
        2: ("TP2+SP+EP2", "PP2", "EP2", "TP2+SP+ETP2", "CP2+EP2", "PP2+VPP2"),
        3: ("1 + EP2", "TP2 + 1"),
        4: ("PP2+TP2+SP+EP2", "PP2+DP2+EP2"),
    },
}
# Relative; measured 8.5e-8 and 2.6e-7 over four kinds of models.
LIMITS = {"loss": 1e-6, "grad_norm": 1e-6}


@dataclass
class Chain:
    """A kind of model, and the format of its first checkpoint; formats take turns."""

    family: str
    hf: Path
    data: Path
    save: Path
    first_format: int = 0

    @property
    def last_step(self) -> int:
        """Of the whole way: a whole model at both ends."""
        return 2 + sum(map(len, STOPS[self.family].values()))

    def journey(self, number: int, split: str | None, save: str | None = None, **changed: Any) -> Journey:
        """The stop of a number."""
        settings = dict(train__train_iters=self.last_step)
        place = dict(hf=str(self.hf), data=str(self.data), save=save or str(self.save), pretrained=str(self.hf))
        ckpt_format = FORMATS[(number + self.first_format) % 2]
        return Journey(**place, split=split, ckpt_format=ckpt_format, settings=settings, **changed)

    def cases(self, ranks: int) -> list[Case]:
        """What `journeys` does on so many ranks."""
        before = 1 + sum(len(splits) for count, splits in STOPS[self.family].items() if count < ranks)
        return [
            ("go_on", dict(journey=asdict(self.journey(before + i, split)), count=1))
            for i, split in enumerate(STOPS[self.family][ranks])
        ]


def on_ranks(ranks: int, cases: list[Case], scratch: Path) -> list[Any]:
    """What `journeys` returns for each."""
    output = scratch / f"found_{ranks}.pt"
    run_ranks("tests.training.journeys", ranks, output, json.dumps(cases), timeout=1800)
    return torch.load(output)


def errors(found: list[list[float]], expected: list[list[float]]) -> dict[str, float]:
    """The largest of losses and gradient norms."""
    assert [entry[0] for entry in found] == [entry[0] for entry in expected]
    return {
        name: max(abs(one[i] / other[i] - 1) for one, other in zip(found, expected, strict=True))
        for i, name in ((1, "loss"), (2, "grad_norm"))
    }


def travel(chains: list[Chain], scratch: Path, more: Sequence[Case] = ()) -> tuple[list[dict[str, float]], list[Any]]:
    """The whole way of each.

    Args:
        chains: several, which share the processes that are started.
        scratch: a folder.
        more: other cases, for the processes of two ranks.

    Returns:
        Errors of each chain beside a run that made the way in one piece and one process; and what is found of `more`.
    """
    from .journeys import do_go_on

    expected, found, answers = [], [], []
    for chain in chains:
        whole = chain.journey(0, None, str(chain.save) + "_whole")
        expected.append(do_go_on(asdict(whole), chain.last_step))
        found.append(do_go_on(asdict(chain.journey(0, None)), 1))
    for ranks in (2, 3, 4):
        cases = [(n, case) for n, chain in enumerate(chains) for case in chain.cases(ranks)]
        others = list(more) if ranks == 2 else []
        logs = on_ranks(ranks, [case for _, case in cases] + others, scratch)
        for (n, _), log in zip(cases, logs, strict=False):
            found[n] += log
        answers += logs[len(cases) :]
    for chain, log in zip(chains, found, strict=True):
        log += do_go_on(asdict(chain.journey(chain.last_step - 1, None)), 1)
    return [errors(one, other) for one, other in zip(found, expected, strict=True)], answers


def main() -> None:
    """Every kind of model to every stop, in both formats."""
    from qwen3vl_bridge.checkpoint import copy_side_files

    from examples.digits.checkpoint import make_checkpoint
    from examples.digits.dataset import make_dataset
    from tests.model.torch_dist_models import make_experts_everywhere

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_dataset(root / "data")
        folders = {
            ("dense", "untied"): make_checkpoint(root / "untied", seed=1),
            ("dense", "tied"): make_checkpoint(root / "tied", seed=2, tied=True),
            ("MoE", "mixed"): make_checkpoint(root / "mixed", seed=3, moe=True),
            ("MoE", "experts"): root / "experts",
        }
        copy_side_files(root / "mixed", root / "experts")
        make_experts_everywhere(root / "mixed", root / "experts")
        bad = 0
        for first, ((family, kind), hf) in ((i, item) for i in range(2) for item in folders.items()):
            chain = Chain(family, hf, root / "data", root / "run", first)
            ((found,), _) = travel([chain], root)
            print(kind, FORMATS[first], found, flush=True)
            bad += any(not found[name] <= limit for name, limit in LIMITS.items())
            for folder in root.glob("run*"):
                shutil.rmtree(folder)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
