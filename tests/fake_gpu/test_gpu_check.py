"""The GPU check runs whole on the fake GPU: all lines of its tests but assertions, and its benchmark of our ways."""

from __future__ import annotations

import csv
import subprocess
import sys

from qwen3vl_bridge.rehearsal import fake_gpu

import pytest

from .conftest import ROOT

# `tests/gpu/test_benchmark.py` starts a process of its own, for transformers too; Transformer Engine's attention in
# float32 allocates what lengths on the GPU say.
TESTS = ("tests/gpu", "--ignore=tests/gpu/test_benchmark.py", "-k", "not (float32 and Engine)")
BENCHMARK = """
from tests.fake_gpu.without_values import stand_ins
from benchmarks import gpu

with stand_ins():
    gpu.main()
"""


@pytest.mark.slow
def test_every_test_runs_to_its_end(built):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "tests.fake_gpu.without_values", *TESTS]
    variables = fake_gpu.environment(built) | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [*command, "--assert=plain", "-p", "no:cacheprovider"], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    print(done.stdout[-1000:])
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_benchmark_measures_our_ways(built, tmp_path):
    """By FlashAttention in both towers, in bfloat16."""
    ways = ["--tiny", "--rounds", "1", "--ways", "ours", "step", "--csv", str(tmp_path / "gpu.csv")]
    command = [sys.executable, "-c", BENCHMARK, *ways, "--profile", str(tmp_path / "timelines")]
    variables = fake_gpu.environment(built) | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    with (tmp_path / "gpu.csv").open() as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {"ours, packed", "ours, padded", "step, packed"}
    assert {row["attention"] for row in rows.values()} == {"flash"}
    assert {row["device"] for row in rows.values()} == {"NVIDIA H100 80GB HBM3"}
