"""What ranks gather on the host to save a checkpoint, where the machine has no room for it."""

from qwen3vl_bridge.training import run_checks

import pytest
import torch
from megatron.bridge.training.config import runtime_config_update


@pytest.fixture
def start(inputs, monkeypatch, tmp_path):
    """Completes a run's configuration as Megatron-Bridge's loop does on a machine of two GPUs with little memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def start(*, room: int, **settings):
        monkeypatch.setattr(run_checks, "host_bytes", lambda: room)
        cfg = inputs.config(tmp_path, checkpoint__ckpt_format="torch_dist", ddp__use_megatron_fsdp=False, **settings)
        runtime_config_update(cfg)

    return start


def test_a_first_save_that_would_end_the_run_is_refused_before_it(start):
    """Recipes, as people start them under torchrun: one process of two asks for both."""
    by_numbers = dict(checkpoint__dist_ckpt_optim_fully_reshardable=False)
    with pytest.raises(
        ValueError, match=r"takes .* on each of 1 ranks, .*optim_fully_reshardable False, .* GiB a rank"
    ):
        start(room=2**20)
    for settings in (dict(room=2**40), dict(room=2**20, **by_numbers), dict(room=2**20, checkpoint__save=None)):
        start(**settings)


def test_this_machine_has_some_memory():
    assert 2**28 < run_checks.host_bytes() < 2**50
