"""`python -m benchmarks.gpu` measures every implementation, here with a tiny model."""

import csv
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_gpu_benchmark_measures_every_implementation(device, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--rounds", "1", "--csv", tmp_path / "gpu.csv"]
    paths = [ROOT / "src", ROOT / "recipes", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [*command, "--profile", tmp_path / "timelines"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    with (tmp_path / "gpu.csv").open() as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    assert rows.keys() >= {"ours, packed", "ours, padded", "transformers, sdpa", "step, packed"}
    assert all(float(row["tokens/s"]) > 0 for row in rows.values())
    assert {row["waits"] for way, row in rows.items() if not way.startswith("transformers")} == {"0"}
    assert float(rows["step, packed"]["planned GiB"]) > 0
    assert len(list((tmp_path / "timelines").iterdir())) == len(rows)
