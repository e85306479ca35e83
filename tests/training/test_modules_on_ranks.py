"""Vision and language on ranks of their own make the runs of one model, in the small loop and in Megatron-Bridge's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import export_checkpoint
from qwen3vl_bridge.training.metrics import TIMED

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import run_ranks

from .modules_on_ranks import FROZEN, STEPS, config

# Relative, beside one process in float32.
LIMITS = {"loss": 1e-6, "valid_loss": 1e-6, "grad_norm": 5e-6}
VISION = {"2 + 1": (0, 1), "1 + DP2": (0,), "1 + PP2": (0,)}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def found(inputs, scratch) -> list[dict[str, Any]]:
    """What each rank has seen."""
    output = scratch / "found.pt"
    run_ranks("tests.training.modules_on_ranks", 3, output, inputs.hf, inputs.data, scratch, timeout=1800)
    return torch.load(output)


@pytest.fixture(scope="module")
def expected(inputs, scratch) -> dict[str, list[dict[str, float]]]:
    """Logs of one process."""
    from qwen3vl_bridge.training.loop import train

    places = str(inputs.hf), str(inputs.data)
    return {
        "whole": train(config(*places, str(scratch / "whole"))),
        "frozen": train(config(*places, None, **FROZEN)),
    }


def worst(log: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    """The largest relative error of each kind of figure; what is counted is the same."""
    errors = dict.fromkeys(LIMITS, 0.0)
    for one, two in zip(log, other, strict=True):
        assert one.keys() - set(TIMED) == two.keys() - set(TIMED)
        for name in one.keys() - set(TIMED):
            kind = "grad_norm" if name.startswith("grad_norm") else name
            if kind in LIMITS and two[name]:
                errors[kind] = max(errors[kind], abs(one[name] / two[name] - 1))
            else:
                assert one[name] == pytest.approx(two[name], rel=1e-12), name
    return errors


def weights(run: Path, to: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, by the converter."""
    export_checkpoint(run, to, progress=False)
    return {name: tensor for path in to.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("name", "other", "gradients"),
    [("small, 2 + 1", "whole", True), ("small, 1 + DP2", "whole", True), ("frozen, 1 + PP2", "frozen", False)],
)
def test_the_small_loops_log_is_that_of_one_process(found, expected, name, other, gradients):
    log, come_back = found[0][name]
    assert come_back == [gradients]
    assert {one for rank in found for one in rank[name][1]} == {gradients}
    errors = worst(log, expected[other])
    print(name, errors)
    assert all(errors[kind] <= limit for kind, limit in LIMITS.items())


@pytest.mark.parametrize("split", ["2 + 1", "1 + DP2"])
def test_megatron_bridges_own_loop_does_the_same(found, expected, split):
    """Its set-up, its schedule, its loaders; rows of language ranks are read by those of the tower, however many."""
    steps = [(entry["loss"], entry["grad_norm"]) for entry in expected["whole"] if "loss" in entry]
    assert len(steps) == STEPS
    for rank, seen in enumerate(found):
        mine = seen[f"bridge, {split}"]
        if rank in VISION[split]:
            assert not mine
            continue
        for (loss, norm), (whole_loss, whole_norm) in zip(mine, steps, strict=True):
            print(rank, loss / whole_loss - 1, norm / whole_norm - 1)
            assert abs(loss / whole_loss - 1) <= LIMITS["loss"]
            assert abs(norm / whole_norm - 1) <= LIMITS["grad_norm"]


def test_a_checkpoint_is_that_of_one_model(found, expected, scratch):
    whole, mine = (weights(scratch / run, scratch / f"hf_{run}") for run in ("whole", "small"))
    assert mine.keys() == whole.keys()
    error = max((mine[name] - whole[name]).abs().max().item() for name in whole) / 1e-3
    print("weights, in learning rates", error)
    assert error <= 1e-2
