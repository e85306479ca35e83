"""The README's status table is the one that the repository gives, and what it names exists."""

from __future__ import annotations

import subprocess
import sys

from scripts import status
from scripts.gpu_check.results import RESULTS, Outcome
from scripts.gpu_check.steps import STEPS


def test_the_readmes_table_is_up_to_date():
    done = subprocess.run([sys.executable, status.__file__, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_it_names_exists():
    steps = {step.name for step in STEPS}
    for feature in status.FEATURES:
        assert all((status.ROOT / test).exists() for test in feature.tests), feature
        assert feature.step is None or feature.step in steps, feature


def test_results_of_a_gpu_check_fill_the_column(tmp_path):
    assert "passed" not in status.table(status.outcomes(tmp_path / "none.jsonl"))
    results = tmp_path / RESULTS
    results.write_text(Outcome("speed", "passed", 1.0).line)
    (row,) = (row for row in status.table(status.outcomes(results)).splitlines() if "Speed" in row)
    assert row.endswith("| passed |")
