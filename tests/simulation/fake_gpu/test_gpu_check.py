"""Run the GPU check on the fake GPU: its tests without assertions, and the benchmark of our model."""

import csv
import subprocess
import sys

from qwen3vl_bridge.simulation import fake_gpu

import pytest

from tests.simulation.fake_gpu.conftest import ROOT

# `tests/gpu/test_benchmark.py` starts another process. Transformer Engine's attention in float32 allocates by lengths
# that it reads from the GPU.
TESTS = ("tests/gpu", "--ignore=tests/gpu/test_benchmark.py", "-k", "not (float32 and Engine)")
BENCHMARK = """
from tests.simulation.fake_gpu.without_values import replace_functions_that_read_values
from benchmarks import gpu

with replace_functions_that_read_values():
    gpu.main()
"""


def run(built, *words: str) -> str:
    variables = fake_gpu.environment(built) | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_gpu_tests_without_assertions_pass_on_fake_gpu(built):
    plugins = ["-p", "tests.simulation.fake_gpu.without_values", "-p", "no:cacheprovider"]
    said = run(built, "-m", "pytest", "-q", "-m", "gpu", "--assert=plain", *plugins, *TESTS)
    print(said[-1000:])
    assert " passed" in said.splitlines()[-1]


@pytest.mark.slow
def test_gpu_benchmark_of_our_model_runs_on_fake_gpu(built, tmp_path):
    """The benchmark uses FlashAttention in both towers."""
    ways = ["--tiny", "--rounds", "1", "--ways", "ours", "step", "--csv", str(tmp_path / "gpu.csv")]
    run(built, "-c", BENCHMARK, *ways, "--profile", str(tmp_path / "timelines"))
    with (tmp_path / "gpu.csv").open() as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {"ours, packed", "ours, padded", "step, packed"}
    assert {row["attention"] for row in rows.values()} == {"flash"}
    assert {row["device"] for row in rows.values()} == {"NVIDIA H100 80GB HBM3"}
