"""Scripts that train by Megatron-Bridge's loop, as the README has one: the process that saving starts imports them."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

from qwen3vl_bridge.training.checkpoint_manager import signals_blocked

import pytest

# As far as saving is concerned: Megatron-Bridge's set-up makes the manager that the configuration names.
TRAIN = """
cfg = qwen3_vl_digits_sft_config()
cfg.checkpoint.save, cfg.checkpoint.ckpt_format = "run", "torch_dist"
callbacks = qwen3vl_bridge.training_callbacks(cfg)
Qwen3VLCheckpointManager(cfg.checkpoint)
print("trains")
"""
IMPORTS = """
import qwen3vl_bridge
from qwen3vl_bridge.training.checkpoint_manager import Qwen3VLCheckpointManager
from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
"""


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [False, True])
def test_a_script_without_a_guard_ends_before_it_trains(tmp_path, guarded):
    """It would hang at its first save, with both processes waiting for each other."""
    guard = f'if __name__ == "__main__":\n{textwrap.indent(TRAIN, "    ")}'
    (script := tmp_path / "script.py").write_text(IMPORTS + (guard if guarded else TRAIN))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if guarded:
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "trains"), done.stderr[-3000:]
        return
    assert done.returncode == 1 and "trains" not in done.stdout
    theirs, ours = (
        "was started to save checkpoints, but ran the training script again",
        "saves checkpoints ended at once",
    )
    assert theirs in done.stderr and ours in done.stderr
    assert 'must do its work under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


def test_what_is_started_has_none_of_the_signals_that_are_handled():
    """As torchrun sends SIGTERM to all processes of a rank, whose own has a handler."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        with signals_blocked():
            child = subprocess.Popen(["sleep", "60"])
            child.send_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert received == [1] and child.poll() is None
        child.kill()
        assert child.wait() == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGTERM, before)
