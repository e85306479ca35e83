"""This package sends nothing to a group of one rank: in a step of one process, and of two."""

from __future__ import annotations

import shutil
from collections import Counter

from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.config import GuardConfig

import pytest
import torch

from tests.forked import run_ranks
from tests.steps import followed, set_up, train_step

from .lone_groups_on_ranks import collectives_sent
from .running import replicate


@pytest.fixture
def sent():
    """How often each package has called a collective."""
    with collectives_sent() as found:
        yield found


def by_package(sent) -> Counter[str]:
    """The same by package alone."""
    found = Counter()
    for (owner, *_), times in sent.items():
        found[owner] += times
    print(dict(found), dict(sent))
    return found


def test_a_step_with_all_that_follows_it(inputs, sent):
    """Losses that are recorded and guarded, norms, rates, figures of the log."""
    cfg = replicate(inputs.config(None, logger__log_interval=1))
    run = set_up(cfg)
    run.cfg.guard = GuardConfig(on_nan="skip", on_spike="skip")
    with followed(run, training_callbacks(cfg)):
        train_step(run)
        sent.clear()
        train_step(run)
    found = by_package(sent)
    assert found["megatron-core"] > 0  # the watch sees what is sent
    assert found["ours"] == 0


@pytest.mark.parametrize("kind", ["moe_folder", "qwen3_5"])
def test_a_model_with_experts_forward_and_backward(kind, request, sent, tmp_path):
    """Their balance and their load are of all ranks."""
    from tests.parity.batches import make_batch, make_samples
    from tests.parity.conftest import make_pair
    from tests.qwen3_5.tiny import make_checkpoint

    folder = make_checkpoint(tmp_path / "made", moe=True) if kind == "qwen3_5" else request.getfixturevalue(kind)
    pair = make_pair(folder, moe_aux_loss_coeff=0.01)
    inputs = make_batch(make_samples("mixed", pair.config, seed=8), pair.config, packed=True).local()
    sent.clear()
    (pair.megatron(inputs=inputs) * inputs.loss_mask).sum().backward()
    assert by_package(sent)["ours"] == 0


@pytest.mark.slow
def test_groups_of_one_rank_among_two(moe_folder, tmp_path):
    """Two data-parallel replicas: only what concerns both is sent."""
    folder = str(shutil.copytree(moe_folder, tmp_path / "model"))
    run_ranks("tests.training.lone_groups_on_ranks", 2, tmp_path / "sent.pt", folder, timeout=200)
    for found in torch.load(tmp_path / "sent.pt", weights_only=False):
        print(found)
        ours = {ranks for (owner, *_, ranks), times in found.items() if owner == "ours"}
        theirs = {ranks for (owner, *_, ranks), times in found.items() if owner != "ours"}
        assert ours == {2} and 1 in theirs  # the count sees both
