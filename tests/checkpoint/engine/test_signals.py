"""Signals that tell a conversion to end: the first is followed, the next do not break off its tidying up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Writing a unit takes a second and removing what was written another one; both say so when they begin.
SLOW = """
import shutil, sys, time
from qwen3vl_bridge.cli import convert as cli; from qwen3vl_bridge.checkpoint.formats import planned_files

write, remove = planned_files._write_unit, shutil.rmtree

def slowly(*arguments):
    print("writing", flush=True)
    time.sleep(1.5)
    write(*arguments)

def removed(*arguments, **options):
    print("removing", flush=True)
    time.sleep(1.5)
    remove(*arguments, **options)

planned_files._write_unit, shutil.rmtree = slowly, removed
sys.exit(cli.main())
"""


@pytest.fixture
def started(untied_folder, tmp_path) -> Iterator[subprocess.Popen]:
    arguments = ["import", "--no-progress", "--hf-model", untied_folder, "--megatron-path", tmp_path / "out" / "m"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.communicate()


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_break_off_the_tidying(number, started, tmp_path):
    started.send_signal(number)
    time.sleep(0.1)
    started.send_signal(signal.SIGTERM)  # of the same Ctrl-C
    time.sleep(1.1)
    started.send_signal(number)  # while the threads end, or what they wrote is removed
    out, error = started.communicate(timeout=30)
    assert error == (
        "interrupted, cleaning up; interrupt again to stop at once and leave the cleanup to the next run\ninterrupted\n"
    )
    assert started.returncode == 130 and out.endswith("removing\n")
    assert left(tmp_path) == []


def test_a_third_signal_ends_at_once(started, untied_folder, tmp_path):
    for _ in range(3):
        started.send_signal(signal.SIGINT)
        time.sleep(1.05)
    _, error = started.communicate(timeout=30)
    assert started.returncode == 130 and error.count("\n") == 1 and "interrupt again to stop at once" in error
    assert all(path.name.startswith(".m.partial-") for path in (tmp_path / "out").iterdir())
    assert not (tmp_path / "out" / "m").exists()


def test_what_nohup_ignores_stays_ignored(untied_folder, tmp_path):
    arguments = ["import", "--no-progress", "--hf-model", untied_folder, "--megatron-path", tmp_path / "m"]
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", SLOW, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "writing\n"
    os.kill(process.pid, signal.SIGHUP)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0 and str(tmp_path / "m") in out, error
