"""Run tests in a process with flash-linear-attention.

`make env` installs it beside the environment (requirements/fla.txt), because inside it would change other tests and the
planner.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix, "fla")
PYTHONPATH = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path, str(FOLDER)])
needs_package = pytest.mark.skipif(
    not FOLDER.is_dir() and importlib.util.find_spec("fla") is None,
    reason="flash-linear-attention is neither installed nor beside the environment, where `make env` puts it",
)
