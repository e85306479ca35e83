"""Runs resume with a different parallel layout in Megatron-Bridge's loop, with equal results."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.noise import check
from tests.training.checkpointing.journeys import Case, Chain, Journey, errors, export, interrupt, travel
from tests.training.checkpointing.ranks_that_die import DEATHS, MOMENTS, STEP, TRACKER

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
# Error of weights after all steps, in units of the learning rate; measured 4.2e-4.
WEIGHT = 1e-2
ROUNDED_WEIGHT = 1  # in bfloat16; not measured yet
# Parallel layouts of runs that start from Megatron checkpoints, by format.
BEGUN = {"torch_dist": "TP2+SP+EP2", "fsdp_dtensor": "PP2"}


@dataclass
class Found:
    chains: list[tuple[Chain, tuple[dict[str, float], dict[str, float]]]]
    interrupted: list[bool]
    begun: dict[Path, tuple[list[list[float]], dict[str, torch.Tensor]]]
    first_step: list[list[float]]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    from qwen3vl_bridge.testing.digits import make_dataset

    make_dataset(folder := tmp_path_factory.mktemp("data"))
    return folder


@pytest.fixture(scope="module")
def found(data, tied_folder, untied_folder, moe_folder, tmp_path_factory) -> Found:
    root = tmp_path_factory.mktemp("journeys")

    def case(what, name: str, hf: Path, split: str, settings=None, **changed) -> Case:
        settings = dict(train__train_iters=4) | (settings or {})
        return what, Journey(str(hf), str(data), str(root / name), split, settings=settings, **changed), 1

    # With a frozen language model the last stage has nothing to train.
    frozen = dict(model__freeze_language_model=True)
    kinds = (
        (untied_folder, "TP2+SP", dict(distributed=True)), (moe_folder, "TP2+SP+EP2", {}), (moe_folder, "PP2+VPP2", {}),
        (untied_folder, "PP2", dict(settings=frozen)), (untied_folder, "DP2", dict(fsdp=True)),
    )  # fmt: skip
    interrupted = [case(interrupt, f"interrupted_{n}", *kind[:2], **kind[2]) for n, kind in enumerate(kinds)]
    begun = []
    for ckpt_format, split in BEGUN.items():
        first = root / f"imported_{ckpt_format}"
        import_checkpoint(moe_folder, first, ckpt_format=ckpt_format, progress=False)
        begun.append(case(export, f"begun_{ckpt_format}", moe_folder, split, pretrained=str(first)))
    chains = [
        Chain("dense", tied_folder, data, root / "dense", distributed=True),
        Chain("MoE", moe_folder, data, root / "MoE"), Chain("sharded", untied_folder, data, root / "sharded"),
    ]  # fmt: skip
    logs, worst, others = travel(chains, root, interrupted + begun)
    answers = iter(others)
    return Found(
        list(zip(chains, worst, strict=True)), [next(answers) for _ in interrupted],
        {Path(journey.save): next(answers) for _, journey, _ in begun}, logs[1][:1],
    )  # fmt: skip


def by_converter(run: Path, to: Path) -> dict[str, torch.Tensor]:
    export_checkpoint(run, to, progress=False)
    return {name: tensor for file in to.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_run_resumed_with_changing_parallel_layouts_matches_one_process(found, tmp_path):
    for chain, (worst, limits) in found.chains:
        print(chain.family)
        check(worst, limits)
        ours = by_converter(chain.save, tmp_path / chain.family)
        theirs = by_converter(Path(f"{chain.save}_whole"), tmp_path / f"{chain.family}_whole")
        assert ours.keys() == theirs.keys()
        error = max((ours[name] - theirs[name]).abs().max().item() for name in ours) / 1e-3
        print(chain.family, "weights", error)
        assert error <= (ROUNDED_WEIGHT if chain.family == "sharded" else WEIGHT)


def test_interrupted_run_on_two_ranks_resumes_bit_exactly(found):
    assert found.interrupted == [True] * 5


def test_run_from_megatron_checkpoint_exports_its_trained_weights(found, tmp_path):
    assert len(found.begun) == 2
    ((_, limits),) = [worst for chain, worst in found.chains if chain.family == "MoE"]
    for run, (log, weights) in found.begun.items():
        check(errors(log, found.first_step), limits)
        stored = by_converter(run, tmp_path / run.name)
        assert stored.keys() == weights.keys()
        assert all(torch.equal(stored[name], weights[name]) for name in stored)


def test_older_checkpoint_survives_if_rank_is_killed_or_fails_during_save(data, untied_folder, tmp_path):
    def journey(name: str, split: str, **kind) -> dict:
        places = str(untied_folder), str(data), str(tmp_path / name)
        return asdict(Journey(*places, split, settings=dict(train__train_iters=4), **kind))

    # After the tensors both formats save alike. The last case has separate vision ranks.
    cases = [
        (journey("sharded", "DP2", fsdp=True), list(MOMENTS)),
        (journey("split", "TP2+SP", distributed=True), list(MOMENTS)[:4]),
        (journey("modules", "1 + 1"), [STEP, *list(MOMENTS)[:4]]),
    ]
    command = [sys.executable, "-m", "tests.training.checkpointing.ranks_that_die", json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for (_, moments), ends in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        print({moment: round(end["seconds"], 1) for moment, end in ends.items()})
        first, last = ends.pop("None"), ends.pop("nothing")
        assert (first["codes"], first["tracker"]) == ([0, 0], "1")
        # Remains of dead ranks are removed, and the step is saved; ranks that died at the tracker had saved a step too.
        reached = "4" if TRACKER in moments else "2"
        assert (last["codes"], last["tracker"], last["hidden"]) == ([0, 0], reached, [])
        assert list(ends) == moments
        for moment, end in ends.items():
            # The other rank fails too, or the launcher ends it (None).
            own = -signal.SIGKILL if moment in (STEP, *DEATHS) else 1
            assert own in end["codes"] and set(end["codes"]) <= {own, 1, None}, (moment, end, done.stderr[-3000:])
            assert end["tracker"] == "1", (moment, end)
