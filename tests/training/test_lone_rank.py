"""A step of one process: this package sends nothing to a group of one rank."""

from __future__ import annotations

import sys
from collections import Counter

from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.config import GuardConfig

import pytest
import torch.distributed as dist

from tests.steps import followed, set_up, train_step

from .running import replicate

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "barrier", "all_to_all", "all_to_all_single", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast_object_list", "gather_object"),
)
PACKAGES = {"/qwen3vl_bridge/": "ours", "/megatron/core/": "megatron-core", "/megatron/bridge/": "Megatron-Bridge"}


@pytest.fixture
def sent(monkeypatch):
    """How often each package has called a collective, by package, file and collective."""
    found: Counter[tuple[str, ...]] = Counter()

    def watched(name, collective):
        def call(*args, **kwargs):
            frame = sys._getframe(1)
            while (path := frame.f_code.co_filename).endswith("/compat/cpu.py") or "/torch/" in path:
                frame = frame.f_back
            owner = next((owner for part, owner in PACKAGES.items() if part in path), "others")
            found[owner, path.rpartition("/")[2], name] += 1
            return collective(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, watched(name, getattr(dist, name)))
    return found


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
