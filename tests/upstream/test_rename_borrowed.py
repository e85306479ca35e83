"""A name of another package that changes its name is noticed by the contract test of its mechanism."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_contract_test_fails_if_upstream_name_is_renamed():
    """Three names, others each day; the script without arguments tries ten."""
    seed = int(time.time()) // 86400
    command = [sys.executable, "scripts/rename_borrowed.py", "--seed", str(seed), "--count", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
