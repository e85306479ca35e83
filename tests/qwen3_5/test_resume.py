"""Runs that go on with more or less to train than before: multi-token prediction, and parts that were frozen."""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError

import pytest
import torch

from tests.steps import save, set_up, train_step
from tests.training.conftest import Inputs
from tests.training.running import replicated, sharded, stored

FACTOR = "model__mtp_loss_scaling_factor"
STEPS = dict(train__train_iters=6, validation__eval_iters=0, scheduler__lr_warmup_iters=0)
NUMBERED = dict(checkpoint__dist_ckpt_optim_fully_reshardable=False)


@pytest.fixture(scope="module")
def inputs(qwen3_5_folders, digits) -> Inputs:
    return Inputs(qwen3_5_folders["dense"], digits, qwen3_5_folders["dense"])


def run(make, inputs: Inputs, into: Path, load: Path | None = None, **settings):
    return set_up(make(inputs, into, **STEPS | dict(checkpoint__load=str(load or into)) | settings))


def step(made) -> dict[str, torch.Tensor]:
    train_step(made)
    save(made)
    return stored(Path(made.cfg.checkpoint.save))


def weights(tensors: dict[str, torch.Tensor], *, mtp: bool) -> dict[str, torch.Tensor]:
    return {
        key: one
        for key, one in tensors.items()
        if "language_model." in key and not key.startswith(("optimizer", "rng")) and (".mtp." in key) == mtp
    }


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys() and ours
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("make", [replicated, sharded], ids=["distributed optimizer", "Megatron-FSDP"])
def test_multi_token_prediction_from_kept_to_trained_and_back(make, inputs, tmp_path):
    kept, trained, again = (tmp_path / name for name in ("kept", "trained", "again"))
    first = step(run(make, inputs, kept, **{FACTOR: 0.0}))
    message = (
        r"mtp_loss_scaling_factor is 0.1, the checkpoint has 0.0: .* lacks the state of parameters .*load_optim=false"
    )
    with pytest.raises(CheckpointError, match=message):
        run(make, inputs, trained, kept, **{FACTOR: 0.1})
    made = run(make, inputs, trained, kept, **{FACTOR: 0.1}, checkpoint__load_optim=False)
    assert made.progress.step == 1
    second = step(made)
    assert not same(weights(first, mtp=True), weights(second, mtp=True))
    made = run(make, inputs, again, trained, **{FACTOR: 0.0})  # the other parameters' state is loaded
    third = step(made)
    assert made.progress.step == 3
    before, after = (weights(one, mtp=True) for one in (second, third))
    if make is sharded:  # Megatron-FSDP has frozen parameters in bfloat16 alone
        before = {key: one.bfloat16() for key, one in before.items()}
    assert same(before, after)
    assert not same(weights(second, mtp=False), weights(third, mtp=False))
    assert not any(".mtp." in key for key in third if key.startswith("optimizer"))
    with pytest.raises(CheckpointError, match=r"mtp_loss_scaling_factor is 0.1"):
        run(make, inputs, tmp_path / "more", again, **{FACTOR: 0.1})


@pytest.mark.parametrize("change", [(0.0, 0.1), (0.1, 0.0)])
def test_state_by_numbers_fits_the_same_parameters_alone(change, inputs, tmp_path):
    before, after = change
    step(run(replicated, inputs, tmp_path / "before", **{FACTOR: before}, **NUMBERED))
    with pytest.raises(CheckpointError, match=f"is {after}, the checkpoint has {before}: .* by index, and fits no"):
        run(replicated, inputs, tmp_path / "after", tmp_path / "before", **{FACTOR: after}, **NUMBERED)


def test_a_part_that_was_frozen(inputs, tmp_path):
    frozen, later = tmp_path / "frozen", tmp_path / "later"
    step(run(replicated, inputs, frozen, model__freeze_vision_model=True))
    with pytest.raises(CheckpointError, match=r"freeze_vision_model is False, the checkpoint has True: .*load_optim="):
        run(replicated, inputs, later, frozen)
    step(run(replicated, inputs, later, frozen, checkpoint__load_optim=False))
    made = run(replicated, inputs, tmp_path / "last", later, model__freeze_vision_model=True)
    assert made.progress.step == 2
