"""Under sequence parallelism losses are those of one process, and mergers get their whole gradient on every rank."""

import subprocess
import sys
from pathlib import Path

import torch

from .sequence_parallel_gradients import BATCHES, results

LOSS = 1e-5  # absolute, measured 9.5e-7 of losses of about 6
# Relative to the largest entry of each gradient; measured 2.1e-6. Without the sum over ranks it is 0.4 and more.
GRADIENT = 1e-5


def test_losses_and_vision_gradients_are_those_of_one_process(untied_folder, moe_folder, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    module, output = "tests.parity.sequence_parallel_gradients", tmp_path / "found.pt"
    command = [*torchrun, "-m", module, output, untied_folder, moe_folder]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder, found in zip((untied_folder, moe_folder), torch.load(output), strict=True):
        expected = results(folder)
        for batch in BATCHES:
            (losses, gradients), (right_losses, right) = found[batch], expected[batch]
            assert (losses - right_losses).abs().max() <= LOSS, batch
            assert len(gradients) > 20
            for name, gradient in gradients.items():
                if batch[0] == "text only":
                    assert not gradient.any() and not right[name].any()
                else:
                    error = (gradient - right[name]).abs().max() / right[name].abs().max()
                    assert error <= GRADIENT, f"{batch} {name}: {error:.1e}"
