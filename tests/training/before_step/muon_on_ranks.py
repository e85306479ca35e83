"""Run on ranks: Muon steps split models as transformers' matrices are stepped in one process.

torchrun --nproc_per_node N -m tests.training.before_step.muon_on_ranks OUTPUT FOLDERS

FOLDERS is a JSON object with the Hugging Face folder of each model.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.parity.on_ranks import Split
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.ranks import begin, leave
from tests.steps import train_step

from .muon_reference import CONTENT, SETTINGS, STEPS

CASES = {
    1: [("dense", ""), ("MoE", ""), ("Qwen3.5", ""), ("Qwen3.5 MoE", "")],
    2: [("dense", "TP2+SP"), ("Qwen3.5", "TP2+SP"), ("MoE", "EP2"), ("dense", "PP2"), ("Qwen3.5", "DP2")],
}
LAYER_WISE = [("dense", "DP2"), ("MoE", "EP2")]
# With steps that are large against the rounding of weights.
HALF = dict(mixed_precision="bf16_mixed", optimizer__lr=3e-2, optimizer__min_lr=3e-2)


def trained(folder: str, topology: Topology, **settings: Any) -> dict[str, torch.Tensor]:
    split = Split(folder, topology, **SETTINGS | settings)
    split.run.stream = split.batches(CONTENT, "packed", steps=STEPS)
    for _ in range(STEPS):
        train_step(split.run)
    return split.exported()


def gather_uneven(outputs: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
    if len({output.shape for output in outputs}) == 1:
        return _gather(outputs, mine, group=group)
    longest = max(len(output) for output in outputs)
    padded = [output.new_empty(longest) for output in outputs]
    _gather(padded, torch.cat([mine, mine.new_empty(longest - len(mine))]), group=group)
    for output, longer in zip(outputs, padded, strict=True):
        output.copy_(longer[: len(output)])
    return None


_gather = dist.all_gather


def main(output: str, folders: dict[str, str]) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    found: dict[Any, dict[str, torch.Tensor]] = {}
    for model, name in CASES[ranks]:
        found[model, name] = trained(folders[model], TOPOLOGIES[name] if name else Topology(1))
    for model, name in LAYER_WISE if ranks > 1 else ():
        found[model, name, "muon"] = trained(folders[model], TOPOLOGIES[name], **HALF)
        with mock.patch.object(dist, "all_gather", gather_uneven):
            found[model, name, "dist_muon"] = trained(
                folders[model], TOPOLOGIES[name], **HALF, optimizer__optimizer="dist_muon"
            )
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]))
