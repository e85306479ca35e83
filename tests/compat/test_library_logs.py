"""Other libraries' log: a failed run is logged only where the command does not report the error itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

NAME = "megatron.bridge.training.pretrain"
FAILS = f"""
import logging
from qwen3vl_bridge.compat.library_logs import quiet
quiet()
for error in (ValueError("set this"), RuntimeError("nobody knows")):
    try:
        raise error
    except BaseException:
        logging.getLogger("{NAME}").exception("it failed with %s", error)
"""


def test_a_failed_run_logs_unexpected_errors_only():
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "set this" not in done.stderr
    before, after = done.stderr.split("it failed with nobody knows")
    assert not before and "Traceback" in after and "RuntimeError: nobody knows" in after


def test_megatron_bridge_logs_it_there():
    package = Path(importlib.util.find_spec("megatron.bridge").origin).parent
    source = (package / "training/pretrain.py").read_text()
    assert "logger = logging.getLogger(__name__)" in source and "logger.exception(" in source
