"""The fake GPU, built once, and programs that run on it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from qwen3vl_bridge.rehearsal import fake_gpu

import pytest

ROOT = Path(__file__).resolve().parents[2]
# `result[...]` comes back as `Run.result`.
PRELUDE = """
import json, sys, torch
from qwen3vl_bridge.rehearsal.fake_gpu import mark, on_wait
from tests.fake_gpu.conftest import leave
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
    """End a program that `on_fake_gpu` runs.

    Not as Python ends: if autograd's thread drops a tensor then, torch aborts (issue 38228 of pytorch/pytorch).
    """
    print("RESULT", json.dumps(result), flush=True)
    fake_gpu.mark("the program's end")  # and the log is written
    os._exit(0)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """Where the user's cache would have it, if that were the folder that pytest makes."""
    try:
        return fake_gpu.build(tmp_path_factory.mktemp("cache") / "qwen3vl_bridge" / "fake_gpu")
    except fake_gpu.FakeGPUError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def on_fake_gpu(built, tmp_path_factory) -> Callable[..., Run]:
    """Runs a program, its text after `PRELUDE` or a module of tests, with its arguments."""

    def run(program: str, *arguments: str, gib: float = 80.0, **variables: str) -> Run:
        whole = ["-m", program] if program.startswith("tests.") else ["-c", f"{PRELUDE}\n{program}\n{EPILOGUE}"]
        log = tmp_path_factory.mktemp("run") / "log"
        environment = fake_gpu.environment(built, log, gib) | variables
        if "PYTORCH_CUDA_ALLOC_CONF" not in variables:
            environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # which recipes set in the tests' process
        command = [sys.executable, *whole, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        return Run(fake_gpu.read_log(log), json.loads(line.removeprefix("RESULT ")), done.stderr)

    return run
