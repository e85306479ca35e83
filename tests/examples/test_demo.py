"""`make demo DEMO_ARGS="--family qwen3_5"` to its end, in fewer steps: what it exports reads digits it has not seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from examples.digits.demo import GOAL
from tests.forked import ROOT

STEPS = 240  # of 400


@pytest.mark.slow
def test_a_tiny_qwen3_5_learns_digits(tmp_path):
    assert "$(PY) examples/digits/demo.py $(DEMO_ARGS)" in (ROOT / "Makefile").read_text()
    arguments = ["--family", "qwen3_5", "--work-dir", str(tmp_path / "demo"), f"train.train_iters={STEPS}"]
    done = subprocess.run(
        [sys.executable, "examples/digits/demo.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    before, after = (float(one) / 100 for one in re.findall(r"accuracy (?:before|after) .*?([\d.]+)%", done.stdout))
    print(f"{before:.1%} before, {after:.1%} after")
    assert before <= 0.2 and after >= GOAL
    difference, scale = re.search(
        r"largest logits difference.*?([\d.e-]+) \(largest logit ([\d.]+)\)", done.stdout
    ).groups()
    assert float(difference) <= 1e-4 * float(scale)
