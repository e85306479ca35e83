"""Run comparisons in a process with a release of transformers that knows models which the installed one does not.

`make env` installs it beside the environment (requirements/transformers.txt), because Megatron-Bridge asks for an older
release.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix, "transformers")
needs_newer_transformers = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the newer transformers is not beside the environment, where `make env` puts it"
)


def run_with_newer_transformers(module: str, *arguments: str) -> Any:
    """Run a module as a program, with its folder first on Python's path. Return what it prints last, which is JSON."""
    path = os.pathsep.join([str(FOLDER), str(ROOT), *sys.path])
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
