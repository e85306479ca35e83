"""The demo to its end, in fewer steps: what it exports reads digits it has not seen; and a checkpoint of one's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.digits.demo import GOAL
from tests.forked import ROOT

STEPS = 240  # of 400


def demo(work: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    assert "$(PY) examples/digits/demo.py $(DEMO_ARGS)" in (ROOT / "Makefile").read_text()
    command = [sys.executable, "examples/digits/demo.py", "--work-dir", str(work), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "160"})


def accuracies(output: str) -> tuple[float, float]:
    """Before and after training."""
    before, after = (float(one) / 100 for one in re.findall(r"accuracy (?:before|after) .*?([\d.]+)%", output))
    return before, after


@pytest.mark.slow
@pytest.mark.parametrize("family", [[], ["--family", "qwen3_5"]], ids=["as make demo starts it", "qwen3_5"])
def test_a_tiny_model_learns_digits(family, tmp_path):
    done = demo(tmp_path / "demo", *family, f"train.train_iters={STEPS}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    before, after = accuracies(done.stdout)
    print(f"{before:.1%} before, {after:.1%} after")
    assert before <= 0.2 and after >= GOAL
    difference, scale = re.search(
        r"largest logits difference.*?([\d.e-]+) \(largest logit ([\d.]+)\)", done.stdout
    ).groups()
    assert float(difference) <= 1e-4 * float(scale)


@pytest.mark.slow
def test_a_checkpoint_of_ones_own(untied_folder, tmp_path):
    """Two steps: too few for the goal, which the exit status says; all files are there, and the model is unchanged."""
    before = {path.name: path.read_bytes() for path in untied_folder.iterdir() if path.is_file()}
    steps = ("train.train_iters=2", "scheduler.lr_warmup_iters=1")
    done = demo(tmp_path / "demo", "--hf-model", untied_folder, *steps)
    assert done.returncode == 1 and "the goal 95%" in done.stderr, done.stdout[-2000:] + done.stderr[-2000:]
    assert accuracies(done.stdout)[1] < GOAL
    made = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"megatron", "run", "hf_finetuned", "answers.png", "loss.png"} <= made and "hf" not in made
    assert before == {path.name: path.read_bytes() for path in untied_folder.iterdir() if path.is_file()}
