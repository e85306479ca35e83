"""Shared by tests of objectives: a step on given microbatches, the comparison of two steps, and a small data set."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.collectives import sum_over_ranks
from qwen3vl_bridge.testing.digits import make_dataset
from qwen3vl_bridge.training.objective_settings import ObjectiveConfig

import torch

from tests.helpers.steps import forward_backward
from tests.parity.on_ranks import Split
from tests.parity.references import worst


def run_step(
    split: Split, objective: ObjectiveConfig, batches: Callable[[int], Iterable[TokenBatch]]
) -> dict[str, Any]:
    """Return loss, number of losses, metrics and gradients of a global batch, on all ranks.

    `batches` returns all microbatches, with documents padded to a multiple of its argument.
    """
    run, model = split.run, split.run.cfg.model
    run.cfg.objective = objective
    rank, size = run.groups.dp.rank(), run.groups.dp.size()
    stream = list(batches(2 * model.context_parallel_size * model.tensor_model_parallel_size))[rank::size]
    split.begin(iter(stream), "packed")
    reports: list[dict[str, torch.Tensor]] = []
    loss, number = forward_backward(run, run.stream, len(stream), reports=reports).tolist()
    metrics = {}
    for name in objective.metrics:
        mine = sum((report[name].double() for report in reports), torch.zeros(2, dtype=torch.float64))
        total = sum_over_ranks(mine if run.groups.tp.rank() == 0 else torch.zeros_like(mine)).tolist()
        metrics[name] = total[0] / total[1]
    return dict(loss=loss / number, number=number, metrics=metrics, gradients=split.gradients())


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the relative errors of loss, metrics and gradients; the numbers of losses must be equal."""
    assert found["number"] == expected["number"]
    metrics = [abs(found["metrics"][name] - value) / max(abs(value), 1) for name, value in expected["metrics"].items()]
    loss = abs(found["loss"] / expected["loss"] - 1)
    return dict(loss=loss, metrics=max(metrics), gradient=worst(found["gradients"], expected["gradients"]))


def few_records(folder: Path, kind: str) -> Path:
    """Write records about digits for an objective, "pairs" or "retrieval"; return the folder of a few of them."""
    make_dataset(folder, objectives=True)
    for split, keep in (("train", 24), ("valid", 8)):
        path = folder / kind / f"{split}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:keep]))
    return folder / kind
