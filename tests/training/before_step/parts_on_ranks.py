"""Run on two ranks: parts with rates of their own, and a spoilt sample, in split models.

torchrun --nproc_per_node 2 -m tests.training.before_step.parts_on_ranks OUTPUT FOLDERS

FOLDERS is a JSON object with the Hugging Face folder of each family, in which `parts.pt` lies beside the model.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.training.before_step import TOWER_NORMS, optimizers_of
from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.run_log import ENTRY
from qwen3vl_bridge.training.run_settings import GuardConfig, Qwen3VLTowers

import torch
import torch.distributed as dist

from tests.parity.on_ranks import Split
from tests.parity.references import ADAM, MICROBATCHES, worst
from tests.parity.topologies import TOPOLOGIES
from tests.ranks import begin, leave
from tests.steps import Run, followed, train_step

from .parts_reference import CONTENT, STEPS, TOWERS

HALF = dict(mixed_precision="bf16_mixed")
# Of the microbatches of the last step, one with two samples; the last picture is a video of the second.
SPOILT, BEFORE, BAD = 2, "2.0", "2.1"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: ("dense", name, {}) for name in ("DP2", "CP2", "PP2", "TP2+SP", "DP2, distributed optimizer")},
    "EP2": ("MoE", "EP2", {}),
    "bfloat16, distributed optimizer": ("dense", "DP2, distributed optimizer", HALF),
}


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def named(batch: PackedBatch, number: int) -> PackedBatch:
    return replace(batch, sample_ids=tuple(f"{number}.{i}" for i, n in enumerate(batch.layout.lengths) if n))


def spoilt(batch: PackedBatch) -> PackedBatch:
    pixels = batch.vision.pixel_values.clone()
    pixels[-1] = torch.nan
    return replace(batch, vision=replace(batch.vision, pixel_values=pixels))


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {
        f"{name} {i}": p.detach().clone() for i, chunk in enumerate(run.model) for name, p in chunk.named_parameters()
    }


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def adam_states(run: Run) -> list[torch.Tensor]:
    adams = [one.optimizer for one in optimizers_of(run.optimizer)]
    return [value.clone() for adam in adams for state in adam.state.values() for value in state.values()]


def one_case(case: str, folders: dict[str, str]) -> dict[str, Any]:
    family, name, settings = CASES[case]
    settings = dict(settings, optimizer_config_override_provider=Qwen3VLTowers(**TOWERS), train__train_iters=STEPS + 1)
    split = Split(folders[family], TOPOLOGIES[name], **settings)
    run, rows = split.run, split.batches(CONTENT, "packed", steps=STEPS + 1)
    run.cfg.guard = GuardConfig(on_nan="skip")
    with followed(run, training_callbacks(run.cfg)) as shared:
        found = good_steps(run, rows, shared)
        found["weights"] = split.exported()
        return found | spoilt_step(run, rows)


def good_steps(run: Run, rows: Iterator[PackedBatch], shared: dict[str, Any]) -> dict[str, Any]:
    """Steps as the reference has them: norms of the parts and of all."""
    run.stream = rows
    norms, totals = [], []
    for _ in range(STEPS):
        train_step(run)
        norms.append(dict(shared[TOWER_NORMS]))
        totals.append(shared[ENTRY]["grad_norm"])
    return dict(norms=norms, totals=totals)


def spoilt_step(run: Run, rows: Iterator[PackedBatch]) -> dict[str, Any]:
    """A step with a sample that is none: whether it was skipped and changed nothing, and what was said."""
    messages, log = Messages(), logging.getLogger("qwen3vl_bridge.training.before_step")
    log.addHandler(messages)
    weights, moments = weights_of(run), adam_states(run)
    rank, size = run.groups.dp.rank(), run.groups.dp.size()
    numbers = range(rank, MICROBATCHES, size)
    batches = [named(batch, number) for number, batch in zip(numbers, rows, strict=True)]
    batches = [spoilt(batch) if number == SPOILT else batch for number, batch in zip(numbers, batches, strict=True)]
    run.stream = iter(batches)
    entry = train_step(run)
    after_moments = adam_states(run)
    same = not changed(weights, weights_of(run))
    same &= len(moments) == len(after_moments) and all(map(torch.equal, moments, after_moments))
    log.removeHandler(messages)
    return dict(skipped="skipped" in entry, same=same, messages=messages.seen)


def main(output: str, folders: dict[str, str]) -> None:
    found = {}
    for case, (family, _, settings) in CASES.items():
        found[case] = one_case(case, folders)
        expected = torch.load(Path(folders[family]) / "parts.pt")
        weights = found[case].pop("weights")
        found[case]["weight"] = None if settings else worst(weights, expected["weights"], scale=ADAM["lr"])
        ranks = [None, None]
        dist.all_gather_object(ranks, found[case])
        found[case]["alike"] = all(ranks[0][key] == ranks[1][key] for key in ("norms", "totals", "skipped", "same"))
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]))
