"""Run a test module as a program in Triton's interpreter.

The interpreter runs kernels on a CPU. It needs a process of its own, because Triton reads its variable on import. (In
Triton 3.7 it computes products of bfloat16 wrongly.)
"""

import json
import os
import subprocess
import sys
from typing import Any

from tests.helpers.forked import ROOT


def run_interpreted(module: str, *arguments: str, **variables: str) -> Any:
    """Return the JSON value in the last line that a module prints when it is run as a program.

    Args:
        module: dotted name of the module.
        arguments: its command-line arguments.
        variables: additional environment variables.
    """
    command, environment = [sys.executable, "-m", module, *arguments], dict(TRITON_INTERPRET="1", **variables)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
