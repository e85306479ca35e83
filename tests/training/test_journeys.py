"""Runs that go on at other splits of the model, by checkpoints of either format, as if nothing had happened."""

from __future__ import annotations

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

from .chains import FORMATS, LIMITS, Chain, errors, travel
from .journeys import Journey, do_first_step
from .ranks_that_die import DEATHS, MOMENTS, STEP

ROOT = Path(__file__).resolve().parents[2]
# Of weights after all steps, in units of the learning rate; measured 4.2e-4.
WEIGHT = 1e-2
SPLITS = ("TP2+SP+EP2", "PP2")  # of runs that begin


@dataclass
class Found:
    """What real processes have made.

    Attributes:
        chains: ways from split to split, with their errors.
        interrupted: for several splits, whether a run that was interrupted went on to the last bit.
        exported: weights in memory, by the run's folder.
        begun: logs of first steps, by split and by where the first weights came from.
    """

    chains: list[tuple[Chain, dict[str, float]]]
    interrupted: list[bool]
    exported: dict[Path, dict[str, torch.Tensor]]
    begun: dict[tuple[str | None, str], list]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    from examples.digits.dataset import make_dataset

    make_dataset(folder := tmp_path_factory.mktemp("data"))
    return folder


@pytest.fixture(scope="module")
def found(data, tied_folder, untied_folder, moe_folder, tmp_path_factory) -> Found:
    """Everything at once: starting processes takes longer than what they do."""
    root = tmp_path_factory.mktemp("journeys")

    def journey(name: str | None, hf: Path, split: str | None, ckpt_format: str, first: Path, **settings) -> dict:
        save = None if name is None else str(root / name)
        settings |= dict(train__train_iters=4)
        return asdict(Journey(str(hf), str(data), save, split, ckpt_format, str(first), settings))

    # Where the language model is frozen, the last stage has nothing to train.
    frozen = dict(model__freeze_language_model=True)
    interrupted = [
        ("interrupt", dict(journey=journey(f"interrupted_{n}", hf, split, ckpt_format, hf, **settings), count=1))
        for n, (hf, split, ckpt_format, settings) in enumerate(
            (
                (untied_folder, "TP2+SP", "fsdp_dtensor", {}),
                (moe_folder, "TP2+SP+EP2", "torch_dist", {}),
                (moe_folder, "PP2+VPP2", "fsdp_dtensor", {}),
                (untied_folder, "PP2", "fsdp_dtensor", frozen),
                (untied_folder, "PP2", "torch_dist", frozen),
            )
        )
    ]
    exported = [
        ("export", dict(journey=journey(f"exported_{split}", moe_folder, split, ckpt_format, moe_folder), count=1))
        for split, ckpt_format in zip(SPLITS, FORMATS, strict=True)
    ]
    sources = {"hf": moe_folder}
    for ckpt_format in FORMATS:
        sources[ckpt_format] = root / f"imported_{ckpt_format}"
        import_checkpoint(moe_folder, sources[ckpt_format], ckpt_format=ckpt_format, progress=False)
    begun = {
        (split, source): dict(journey=journey(None, moe_folder, split, "fsdp_dtensor", path))
        for split in (None, *SPLITS)
        for source, path in sources.items()
    }
    chains = [
        Chain("dense", tied_folder, data, root / "dense"),
        Chain("MoE", moe_folder, data, root / "MoE", first_format=1),
    ]
    first_steps = [("first_step", case) for (split, _), case in begun.items() if split]
    worst, others = travel(chains, root, interrupted + exported + first_steps)
    answers = iter(others)
    return Found(
        list(zip(chains, worst, strict=True)),
        [next(answers) for _ in interrupted],
        {Path(case["journey"]["save"]): next(answers) for _, case in exported},
        {(split, source): next(answers) if split else do_first_step(**case) for (split, source), case in begun.items()},
    )


def by_converter(run: Path, to: Path) -> dict[str, torch.Tensor]:
    """Weights of its newest checkpoint, with nothing else at hand."""
    export_checkpoint(run, to, progress=False)
    return {name: tensor for file in to.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_run_goes_on_at_any_split_in_either_format(found, tmp_path):
    for chain, worst in found.chains:
        print(chain.family, worst)
        assert all(worst[name] <= limit for name, limit in LIMITS.items()), worst
        ours = by_converter(chain.save, tmp_path / chain.family)
        theirs = by_converter(Path(f"{chain.save}_whole"), tmp_path / f"{chain.family}_whole")
        assert ours.keys() == theirs.keys()
        error = max((ours[name] - theirs[name]).abs().max().item() for name in ours) / 1e-3
        print(chain.family, "weights", error)
        assert error <= WEIGHT


def test_an_interrupted_run_of_a_split_model_goes_on_to_the_last_bit(found):
    assert found.interrupted == [True] * 5


def test_a_split_models_checkpoint_is_exported(found, tmp_path):
    assert len(found.exported) == 2
    for run, weights in found.exported.items():
        stored = by_converter(run, tmp_path / run.name)
        assert stored.keys() == weights.keys()
        assert all(torch.equal(stored[name], weights[name]) for name in stored)


def test_weights_come_from_any_source_without_conversion(found):
    for split in (None, *SPLITS):
        log = found.begun[split, "hf"]
        assert log == found.begun[split, "fsdp_dtensor"] == found.begun[split, "torch_dist"]
        worst = errors(log, found.begun[None, "hf"])
        assert all(worst[name] <= limit for name, limit in LIMITS.items()), worst


def test_ranks_that_are_killed_or_fail_leave_the_older_checkpoint(data, untied_folder, tmp_path):
    def journey(ckpt_format: str, split: str = "TP2+SP") -> dict:
        places = str(untied_folder), str(data), str(tmp_path / f"{ckpt_format} {split}")
        return asdict(Journey(*places, split, ckpt_format, str(untied_folder), dict(train__train_iters=4)))

    # What comes after the tensors is the same in both formats. The last has vision and language on ranks of their own.
    cases = [
        (journey("fsdp_dtensor"), list(MOMENTS)),
        (journey("torch_dist"), list(MOMENTS)[:4]),
        (journey("torch_dist", "1 + 1"), [STEP, *list(MOMENTS)[:4]]),
    ]
    command = [sys.executable, "-m", "tests.training.ranks_that_die", json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for (_, moments), ends in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        print({moment: round(end["seconds"], 1) for moment, end in ends.items()})
        first, last = ends.pop("None"), ends.pop("nothing")
        assert (first["codes"], first["tracker"]) == ([0, 0], "1")
        # What ranks left when they died is gone, and the step is there.
        assert (last["codes"], last["tracker"], last["hidden"]) == ([0, 0], "2", [])
        assert list(ends) == moments
        for moment, end in ends.items():
            # A rank that fails leaves nothing behind, one that is killed cannot help it.
            expected = [-signal.SIGKILL, 1] if moment in (STEP, *DEATHS) else [1, 1]
            assert sorted(end["codes"]) == expected, (moment, end, done.stderr[-3000:])
            assert moment in (STEP, *DEATHS) or not end["hidden"], (moment, end)
            assert end["tracker"] == "1" and end["seconds"] < 60, (moment, end)
