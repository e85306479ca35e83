"""Loss, gradients and metrics of pairs equal a direct computation with transformers, on one and on several ranks."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.training.config import ObjectiveConfig
from qwen3vl_bridge.training.preference import METRICS

import pytest
import torch

from tests.helpers.ranks import largest
from tests.helpers.forked import results_of_ranks
from tests.helpers.steps import forward_backward
from tests.parity.on_ranks import Split
from tests.parity.references import worst
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.training.preference.pairs import batches, expected_step

SETTINGS = {
    "sigmoid": ObjectiveConfig(kind="dpo", beta=0.05),
    "smoothed": ObjectiveConfig(kind="dpo", beta=0.05, label_smoothing=0.2, rpo_alpha=0.7),
    "robust": ObjectiveConfig(kind="dpo", beta=0.05, loss_type="robust", label_smoothing=0.1),
    "ipo": ObjectiveConfig(kind="dpo", beta=0.4, loss_type="ipo", rpo_alpha=0.5),
}
GRADIENT, LOSS = 1e-5, 1e-6


def run_step(split: Split, objective: ObjectiveConfig, *, with_reference: bool = True) -> dict[str, Any]:
    """Return loss, number of pairs, metrics and gradients of a global batch, on all ranks."""
    run, model = split.run, split.run.cfg.model
    run.cfg.objective = replace(objective, reference_logps="given" if with_reference else None)
    multiple = 2 * model.context_parallel_size * model.tensor_model_parallel_size
    rank, size = run.groups.dp.rank(), run.groups.dp.size()
    stream = list(batches(split.hf_config, multiple, with_reference=with_reference, tokens=split.tokens))[rank::size]
    split.begin(iter(stream), "packed")
    reports: list[dict[str, torch.Tensor]] = []
    loss, pairs = forward_backward(run, run.stream, len(stream), reports=reports).tolist()
    sums = {name: sum((report[name].double() for report in reports), torch.zeros(2).double()) for name in METRICS}
    from qwen3vl_bridge.core.collectives import sum_over_ranks

    for name, value in sums.items():
        total = sum_over_ranks(value if run.groups.tp.rank() == 0 else torch.zeros_like(value)).tolist()
        sums[name] = total[0] / total[1]
    return dict(loss=loss / pairs, pairs=pairs, metrics=sums, gradients=split.gradients())


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    assert found["pairs"] == expected["pairs"]
    metrics = {name: abs(found["metrics"][name] - value) / max(abs(value), 1) for name, value in expected["metrics"].items()}
    loss = abs(found["loss"] / expected["loss"] - 1)
    return {"loss": loss, "metrics": max(metrics.values()), "gradient": worst(found["gradients"], expected["gradients"])}


def errors_of_settings(folder: Path, expected: dict[str, dict]) -> dict[str, dict[str, float]]:
    split = Split(folder, Topology(1))
    return {name: compare(run_step(split, SETTINGS[name]), one) for name, one in expected.items()}


@pytest.fixture(scope="module")
def folders(untied_folder, moe_folder, tmp_path_factory):
    from tests.models.qwen3_5.tiny import make_checkpoint

    return {"dense": untied_folder, "MoE": moe_folder, "Qwen3.5": make_checkpoint(tmp_path_factory.mktemp("qwen3_5"))}


@pytest.mark.parametrize("family", ["dense", "MoE", "Qwen3.5"])
def test_dpo_step_one_process_matches_transformers(folders, family):
    names = SETTINGS if family == "dense" else ["sigmoid"]
    expected = {name: expected_step(folders[family], SETTINGS[name]) for name in names}
    found = errors_of_settings(folders[family], expected)
    print(found)
    for errors in found.values():
        assert errors["loss"] <= LOSS and errors["metrics"] <= LOSS and errors["gradient"] <= GRADIENT
