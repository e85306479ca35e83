"""What of this family is not there yet says so."""

from __future__ import annotations

from qwen3vl_bridge.models.qwen3_5.presets import config_dict
from qwen3vl_bridge.planning.hardware import GPUS
from qwen3vl_bridge.planning.memory.estimate import estimate
from qwen3vl_bridge.planning.proposals import propose
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.registry import preset, preset_sizes

import pytest


def test_the_planner_does_not_know_linear_attention():
    training = Training(seq_length=4096, max_patches=4096, global_batch_size=8)
    with pytest.raises(ValueError, match="24 layers have linear attention"):
        estimate(config_dict("9B"), Split(world=8), training)
    with pytest.raises(ValueError, match="24 layers have linear attention"):
        propose(config_dict("9B"), 8, next(iter(GPUS.values())), training)


def test_sizes_mean_qwen3_vl():
    assert "9B" not in preset_sizes()
    with pytest.raises(ValueError, match="no preset is named '9B'"):
        preset("9B")
