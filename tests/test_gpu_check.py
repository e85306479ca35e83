"""The GPU check, rehearsed on the CPU with tiny sizes, by a Python that has the packed packages and torch alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from scripts.gpu_check import packages, results, runner
from scripts.gpu_check.results import Finding, Outcome, Place, at_least, at_most
from scripts.gpu_check.steps import STEPS, Step

ROOT = Path(__file__).parents[1]


def bare_python(folder: Path) -> Path:
    """A Python that has what the page asks of the machine, and nothing else of this environment."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in packages.required((*packages.GIVEN, *packages.EXPECTED)):
        package = metadata.distribution(name)
        for top in {str(file).split("/")[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(package.locate_file(top)))
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def packed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    packages.pack(folder)
    return folder


@pytest.mark.slow
def test_all_steps_pass_on_a_cpu_with_tiny_sizes(packed, tmp_path):
    python, out = bare_python(tmp_path / "python"), tmp_path / "out"
    places = ("--device", "cpu", "--size", "tiny", "--work", str(tmp_path / "work"), "--out", str(out))
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    command = [str(ROOT / "scripts/gpu_check.sh"), "run", "--from", str(packed), *places]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    outcomes = results.read(out)
    assert list(outcomes) == [step.name for step in STEPS]
    assert {one.status for one in outcomes.values()} == {"passed"}
    assert all(one.findings for one in outcomes.values())
    assert {"summary.md", "results.jsonl", "logs.txt", "kernels.txt", "trace.json.gz"} == {
        p.name for p in out.iterdir()
    }
    lines = (out / results.LOGS).read_text().splitlines()  # which name files that were imported
    assert not [line for line in lines if sys.prefix in line and "/torch/" not in line]

    again = subprocess.run([*command, "--continue"], env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "==" not in again.stdout


@pytest.mark.slow
def test_what_is_packed(packed, tmp_path):
    manifest = json.loads((packed / packages.MANIFEST).read_text())
    versions = {one["name"]: one["version"] for one in manifest["packages"]}
    assert manifest["bytes"] == sum(file.stat().st_size for file in packed.glob("*.zip")) < packages.LIMIT
    assert versions["transformers"] == metadata.version("transformers")
    assert not versions.keys() & {"torch", "numpy", "triton", *packages.EXPECTED}
    assert f"transformers {versions['transformers']}" in packages.unpack(packed, tmp_path / "site")
    kept = tmp_path / "site" / "kept"
    kept.touch()
    packages.unpack(packed, tmp_path / "site")
    assert kept.exists()  # it was complete

    (packed / next(one["archive"] for one in manifest["packages"])).write_bytes(b"damaged")
    with pytest.raises(packages.PackageError, match="damaged"):
        packages.unpack(packed, tmp_path / "other")


def test_packages_of_another_python_are_refused(tmp_path):
    (tmp_path / packages.MANIFEST).write_text(json.dumps({"python": "3.9.1", "processor": "x86_64", "packages": []}))
    with pytest.raises(packages.PackageError, match=r"packed for Python 3\.9\.1"):
        packages.unpack(tmp_path, tmp_path / "site")
    with pytest.raises(packages.PackageError, match=r"gpu_check\.sh pack"):
        packages.unpack(tmp_path / "none", tmp_path / "site")
    with pytest.raises(packages.PackageError, match="--carry numpy"):
        packages.pack(tmp_path / "new", ["numpy"])


def test_a_step_that_breaks_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    def step(name: str, seconds: int = 20) -> Step:
        return Step(name, "machine", seconds, f"broken:{name}")

    (tmp_path / "package").mkdir()
    monkeypatch.setattr(runner, "STEPS", (step("crashes"), step("hangs", 2), step("misses"), step("passes")))
    programs = {
        "crashes": "raise ValueError('no such kernel')",
        "hangs": "import time; time.sleep(60)",
        "misses": 'print(\'[{"subject": "a", "value": "2", "passed": false}]\', file=open(report, \'w\'))',
        "passes": "print('[]', file=open(report, 'w'))",
    }
    started = runner.subprocess.Popen

    def popen(words, **more):
        name, report = words[4], words[6]
        return started([words[0], "-c", f"report = {report!r}\n{programs[name]}"], **more)

    monkeypatch.setattr(runner.subprocess, "Popen", popen)
    place = Place("cpu", "tiny", tmp_path / "work", tmp_path / "out")
    assert not runner.run_all(place, None)
    found = results.read(place.out)
    assert [one.status for one in found.values()] == ["failed", "timed out", "failed", "passed"]
    assert "no such kernel" in found["crashes"].error
    assert "no such kernel" in (place.out / results.SUMMARY).read_text()
    programs["crashes"] = programs["hangs"] = programs["misses"] = programs["passes"]
    programs["passes"] = "raise ValueError('run again')"
    assert runner.run_all(place, None, go_on=True)


def test_findings():
    assert at_most("", 1.0, 1.0).passed and at_least("", 1.0, 1.0).passed
    assert not at_most("", 1.1, 1.0).passed and not at_least("", 0.9, 1.0).passed
    assert not at_most("", float("nan"), 1.0).passed and not at_least("", float("nan"), 1.0).passed
    outcome = Outcome("a", "passed", 1.0, (Finding("b", "c", "d", True),))
    assert Outcome.of(json.loads(outcome.line)) == outcome
