"""The list of upstream's tests that fail with this package, and the scripts of docs/callers.md."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import upstream_tests

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "callers.md"


def test_the_list_can_be_read():
    assert len(upstream_tests.read_failures()) > 5


def test_what_is_unexpected_is_said():
    entries = [
        {"kind": "intended", "why": "so", "tests": ["a.py::T", "b.py::test_one[x]"]},
        {"kind": "machine", "why": "no GPU", "tests": ["c.py"]},
    ]

    def compare(outcomes, *, whole=True, stock=False):
        found = {f"tests/unit_tests/{name}": {"outcome": outcome, "why": "E"} for name, outcome in outcomes.items()}
        return upstream_tests.compare(found, entries, whole=whole, stock=stock)

    listed = {"a.py::T::test_one": "failed", "a.py::T::test_two[1]": "failed", "b.py::test_one[x]": "failed"}
    others = {"b.py::test_one[y]": "passed", "c.py::test_one": "failed", "c.py::test_two": "passed"}
    assert compare(listed | others) == []
    assert compare(listed | others | {"a.py::T::test_two[1]": "passed"}) == ["listed, and no longer fails: a.py::T"]
    (message,) = compare(listed | others | {"b.py::test_one[y]": "failed"})
    assert message.startswith("not listed, and fails: b.py::test_one[y]")
    assert compare({"c.py::test_one": "passed"}, whole=False) == []
    assert len(compare({"c.py::test_one": "passed"})) == 2
    assert compare(others, stock=True) == [] and len(compare(listed | others, stock=True)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["an import added", "our container, step and callbacks"])
def test_a_script_of_ones_own_trains_and_saves(whole, untied_folder, tmp_path):
    script, ours = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    if whole:
        begin, _ = script.split('if __name__ == "__main__":')
        assert "return ConfigContainer(" in begin
        script = begin.replace("return ConfigContainer(", "return qwen3vl_bridge.Qwen3VLConfigContainer(") + ours
    places = {"HF_FOLDER": untied_folder, "RUN": tmp_path / "run"}
    assert all(f'"{name}"' in script for name in places)
    for name, place in places.items():
        script = script.replace(f'"{name}"', repr(str(place)))
    (tmp_path / "mine.py").write_text(script)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (tmp_path / "run" / "metrics.jsonl").exists() == whole
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    # Random weights know nothing of 512 tokens, and learn next to nothing in four steps.
    assert len(losses) == 4 and all(abs(loss - math.log(512)) < 0.3 for loss in losses), losses
