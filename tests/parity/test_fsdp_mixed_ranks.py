"""Megatron-FSDP does not wait for ever when one rank has pictures and the other has none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .conftest import make_pair
from .fsdp_mixed_ranks import CONTENTS, batch

_SECONDS = 300  # about 30 where the machine is free; a hang has no end


def test_pictures_on_one_rank_only(untied_folder, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "-m", "tests.parity.fsdp_mixed_ranks", untied_folder, tmp_path / "losses"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    model = make_pair(untied_folder).megatron
    for rank in range(len(CONTENTS)):
        inputs = batch(str(untied_folder), rank)
        with torch.no_grad():
            expected = (model(inputs=inputs) * inputs.loss_mask).sum().item()
        assert torch.load(tmp_path / f"losses.{rank}") == pytest.approx([expected, expected], rel=1e-6)
