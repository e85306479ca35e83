"""Runs that are terminated or killed at any moment resume with the same command, with equal results."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.training.bridges_loop import Start
from tests.training.running import SHORT, losses, read_log, train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
STEPS = 8
SETTINGS = SHORT | dict(train__train_iters=STEPS, checkpoint__save_interval=2, checkpoint__most_recent_k=1)


class Runs:
    def __init__(self, inputs, folder: Path, *launcher: str, **settings) -> None:
        overrides = [f"{name.replace('__', '.')}={value}" for name, value in (SETTINGS | settings).items()]
        paths = ["--hf-model", inputs.hf, "--data-path", inputs.data, "--save", folder]
        script = [*launcher, ROOT / "recipes" / "finetune.py", "--recipe", "qwen3_vl_digits_sft_config"]
        self.command, self.folder = [sys.executable, *script, *paths, *overrides], folder
        # As in the tests: another number of threads changes the order of sums.
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def until(self, step: int, number: int) -> int:
        with (self.folder.parent / "said").open("w") as said:
            process = subprocess.Popen(self.command, env=self.environment, stdout=said, stderr=said)
        deadline = time.monotonic() + 300
        while self.steps() < step and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        assert process.poll() is None, "it ended by itself"
        process.send_signal(number)
        return process.wait(timeout=120)

    def last_words(self) -> str:
        text = (self.folder.parent / "said").read_text()
        assert "Traceback" not in text, text
        return text.splitlines()[-1]

    def to_the_end(self) -> str:
        done = subprocess.run(self.command, capture_output=True, text=True, env=self.environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stderr

    def steps(self) -> int:
        log = self.folder / "metrics.jsonl"
        return sum('"lr"' in line for line in log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    cfg = replace(inputs, megatron=inputs.hf).config(tmp_path_factory.mktemp("unbroken"), **SETTINGS)
    cfg.mixed_precision = "bf16_mixed"
    return losses(train(cfg))


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "iter_" in path.name)


def test_run_stopped_by_sigterm_saves_and_resumes_bit_exactly(inputs, unbroken, tmp_path):
    runs = Runs(inputs, tmp_path / "run")
    assert runs.until(3, signal.SIGTERM) == 0
    left_after = runs.steps()
    assert 3 <= left_after < STEPS
    assert checkpoints(runs.folder) == [f"iter_{left_after:07d}"]
    stopped = f"stopped after step {left_after} of {STEPS}, as asked: the same command continues from the checkpoint"
    assert runs.last_words() == stopped
    assert runs.until(left_after + 1, signal.SIGINT) == 130
    newest = int(checkpoints(runs.folder)[-1].removeprefix("iter_"))
    continues = (
        rf"interrupted after step \d: the same command continues from step {newest}; SIGTERM instead of .* first"
    )
    assert re.fullmatch(continues, runs.last_words())
    runs.to_the_end()
    assert losses(read_log(runs.folder)) == unbroken


def test_torchrun_stopped_by_sigterm_saves_and_resumes(inputs, tmp_path):
    """Torchrun passes SIGTERM on to all processes of its ranks, and always exits with 1."""
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--shutdown-timeout", "300")
    settings = dict(dataset__num_workers=2, train__train_iters=30, checkpoint__save_interval=100)
    runs = Runs(inputs, tmp_path / "run", *torchrun, **settings)
    assert runs.until(3, signal.SIGTERM) == 1
    left_after = runs.steps()
    assert 3 <= left_after < 30
    assert checkpoints(runs.folder) == [f"iter_{left_after:07d}"]
    runs.to_the_end()
    log = [entry["step"] for entry in read_log(runs.folder) if "lr" in entry]
    assert log == list(range(1, 31))


def test_megatron_bridge_loop_under_torchrun_saves_when_stopped_by_sigterm(inputs, tmp_path):
    """The process that saves exists since the first save, and must survive the signal."""
    settings = dict(train__train_iters=400, checkpoint__save_interval=2, dataset__num_workers=1)
    save, weights = tmp_path / "run", str(inputs.hf)
    start = Start("told", str(inputs.hf), str(inputs.data), weights, str(save), settings)
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "1", "--shutdown-timeout", "300"]
    module = ["-m", "tests.training.bridges_loop", tmp_path / "found.pt", json.dumps([asdict(start)])]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, *torchrun, *module], cwd=ROOT, stdout=said, stderr=said, start_new_session=True
        )
        tracker, deadline = save / "latest_train_state.pt", time.monotonic() + 600
        while not tracker.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 1
    text = (tmp_path / "said").read_text()
    assert "exiting program after receiving SIGTERM" in text, text[-3000:]
    newest = int((save / "latest_checkpointed_iteration.txt").read_text())
    saved = [int(line.split()[5]) for line in text.splitlines() if "successfully saved checkpoint" in line]
    assert saved[-1] == newest and (save / f"iter_{newest:07d}" / "metadata.json").exists()


def test_run_killed_three_times_resumes_bit_exactly(inputs, unbroken, tmp_path):
    """Killed three times, after random steps."""
    runs, seed = Runs(inputs, tmp_path / "run"), random.randrange(1000)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(3):
        first = runs.steps() // 2 * 2  # of the latest checkpoint
        step = rng.randint(min(first + 1, STEPS - 1), STEPS - 1)
        assert runs.until(step, signal.SIGKILL) == -signal.SIGKILL
    runs.to_the_end()
    assert losses(read_log(runs.folder)) == unbroken
    assert checkpoints(runs.folder) == [f"iter_{STEPS:07d}"]
    assert [path.name for path in runs.folder.iterdir() if path.name.startswith(".")] == []


def test_second_run_in_same_folder_exits_with_code_1(inputs, tmp_path):
    """The first run continues; when it is killed, its folder can be used again."""
    runs = Runs(inputs, tmp_path / "run", train__train_iters=3000)
    first = subprocess.Popen(runs.command, env=runs.environment, stderr=subprocess.DEVNULL)
    try:
        while not (runs.folder / "run.lock").exists() and first.poll() is None:
            time.sleep(0.1)
        second = subprocess.run(runs.command, capture_output=True, text=True, env=runs.environment)
        assert second.returncode == 1 and first.poll() is None
        assert f"is in use by another run, process {first.pid} on " in second.stderr
    finally:
        first.kill()
        first.wait()
    assert runs.until(runs.steps() + 1, signal.SIGTERM) == 0
    entries = [json.loads(line) for line in (runs.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [entry["step"] for entry in entries if "lr" in entry]  # without validations
    assert steps == list(range(1, len(steps) + 1)) and not (runs.folder / "run.lock").exists()
