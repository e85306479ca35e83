"""Fixtures that build the fake GPU once and run programs on it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from qwen3vl_bridge.simulation import fake_gpu

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Programs store values in `result`, which becomes `Run.result`.
PRELUDE = """
import json, sys, torch
from qwen3vl_bridge.simulation.fake_gpu import mark, on_sync
from tests.simulation.fake_gpu.conftest import leave
result = {}
"""
EPILOGUE = "leave(result)"


@dataclass
class Run:
    events: list[fake_gpu.Event]
    result: dict
    stderr: str

    def between(self, start: str, end: str) -> list[fake_gpu.Event]:
        return fake_gpu.between(self.events, start, end)


def leave(result: Any) -> NoReturn:
    """Print the result of a program run by `on_fake_gpu` and exit.

    Python's normal exit may abort, if autograd's thread frees a tensor then (issue 38228 of pytorch/pytorch).
    """
    print("RESULT", json.dumps(result), flush=True)
    fake_gpu.mark("the program's end")  # flushes the log
    os._exit(0)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """Build the fake GPU in a temporary folder with the layout of the user's cache."""
    try:
        return fake_gpu.build(tmp_path_factory.mktemp("cache") / "qwen3vl_bridge" / "fake_gpu")
    except fake_gpu.FakeGPUError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def on_fake_gpu(built, tmp_path_factory) -> Callable[..., Run]:
    """Return a function that runs a program: source text, which follows `PRELUDE`, or a module of tests."""

    def run(program: str, *arguments: str, gib: float = 80.0, **variables: str) -> Run:
        command = ["-m", program] if program.startswith("tests.") else ["-c", f"{PRELUDE}\n{program}\n{EPILOGUE}"]
        log = tmp_path_factory.mktemp("run") / "log"
        environment = fake_gpu.environment(built, log, gib) | variables
        if "PYTORCH_CUDA_ALLOC_CONF" not in variables:
            environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # the test process may have set it
        done = subprocess.run(
            [sys.executable, *command, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
        )
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        return Run(fake_gpu.read_log(log), json.loads(line.removeprefix("RESULT ")), done.stderr)

    return run
