"""The GPU check, rehearsed on the CPU with tiny sizes, by a Python that has the packed packages and torch alone."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import venv
import warnings
from collections import Counter
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import pytest

from scripts.gpu_check import packages, results, runner
from scripts.gpu_check.results import Finding, Outcome, Place, at_least, at_most
from scripts.gpu_check.steps import KINDS, STEPS, UNPACKING, Step
from tests.host_waits.counter import PACKAGES

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
    subjects = {one.subject for outcome in outcomes.values() for one in outcome.findings}
    # Megatron-Bridge's own model is built and timed here too, of other layers.
    assert "Megatron-Bridge's own model with local layers and torch's attention: tokens a second" in subjects
    for kind in KINDS:
        waits = f"waits, {kind}: not of megatron-core or Megatron-Bridge, in a step"
        assert {f"{kind}: float32, gradients", waits} <= subjects
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
    def step(name: str, seconds: int = 20, group: str = "machine") -> Step:
        return Step(name, group, seconds, ())

    monkeypatch.setattr(
        runner, "STEPS", (step("crashes"), step("hangs", 2), step("misses"), step("passes", group="speed"))
    )
    programs = {
        "crashes": "raise ValueError('no such kernel')",
        "hangs": f"{writes(done=False)}; import time; time.sleep(60)",
        "misses": writes(Finding("a", "2", "1", False)),
        "passes": writes(),
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
    assert found["hangs"].findings == (Finding("a part", "that was through"),)
    assert "no such kernel" in (place.out / results.SUMMARY).read_text()
    programs["crashes"] = programs["hangs"] = programs["misses"] = programs["passes"]
    programs["passes"] = "raise ValueError('run again')"
    assert runner.run_all(place, None, go_on=True)

    programs["misses"] = "raise ValueError('not asked for')"
    assert not runner.run_all(place, None, ["speed"])
    found = results.read(place.out)
    assert [one.status for one in found.values()] == ["passed"] * 3 + ["failed"]
    assert "run again" in found["passes"].error


def writes(*findings: Finding, done: bool = True) -> str:
    """A program that reports findings, or the only part that was through."""
    found = findings if done else (Finding("a part", "that was through"),)
    text = json.dumps({"done": done, "findings": [asdict(one) for one in found]})
    return f"file = open(report, 'w'); file.write({text!r}); file.close()"


def test_a_part_that_raises_does_not_stop_the_others(tmp_path):
    """In a process of its own, which a step ends."""
    program = f"""
import pathlib
from scripts.gpu_check import results, runner
from scripts.gpu_check.steps import Part, Step
here = pathlib.Path({str(tmp_path)!r})
parts = Part("no_such_module:look", "first"), Part("machine:_gpu", "second")
runner.STEPS = (Step("both", "machine", 20, parts),)
runner.run_step("both", results.Place("cpu", "tiny", here, here), here / "report.json")
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["done"]
    first, second = (Finding(**one) for one in report["findings"])
    assert first.subject == "first: error" and first.passed is False and "no_such_module" in first.value
    assert second == Finding("second: device", "CPU")


def test_a_step_sees_no_packages_or_caches_of_the_user(tmp_path, monkeypatch):
    """A package in the user's folder of modules, as `pip install --user` puts it, where Python is told to look."""
    base, place = tmp_path / "user", Place("cuda", "tiny", tmp_path / "work", tmp_path / "out")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (base, place.work / ".local"):  # the latter is in the HOME of a step
        modules = folder / "lib" / version / "site-packages"
        modules.mkdir(parents=True)
        (modules / "of_the_user.py").touch()
    monkeypatch.setenv("PYTHONUSERBASE", str(base))
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME", "HOME"):
        monkeypatch.setenv(name, str(base / "caches"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    found = runner.environment(place, None)
    assert found["HOME"] == str(place.work) and found["CUDA_VISIBLE_DEVICES"] == "3"
    assert not [name for name, value in found.items() if str(base) in value]
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('of_the_user') is not None)"
    python = sys._base_executable  # an environment made by venv has no folder of the user's
    assert subprocess.run([python, "-c", look], env=os.environ | {"PYTHONPATH": ""}).returncode == 1
    assert subprocess.run([python, "-c", look], env=found).returncode == 0


def test_unpacking_and_all_steps_take_less_than_eight_minutes():
    assert UNPACKING + sum(step.seconds for step in STEPS) < 480
    lines = (ROOT / "docs/gpu_check.md").read_text().splitlines()
    limits = [line.split("|")[2] for line in lines if line.startswith("|")][2:]
    assert [UNPACKING, *(step.seconds for step in STEPS)] == [int(one) for one in limits]


def test_unpacking_has_a_limit(tmp_path):
    made = {"python": platform.python_version(), "processor": platform.machine()}
    one = {"name": "a", "version": "1", "archive": "a.zip", "sha256": ""}
    (tmp_path / packages.MANIFEST).write_text(json.dumps(made | {"packages": [one]}))
    with pytest.raises(packages.PackageError, match="0 of 1 packages were unpacked"):
        packages.unpack(tmp_path, tmp_path / "site", -1)


@pytest.mark.parametrize("fits", [(), ("transformers, sdpa",), ("ours, packed",)], ids=str)
def test_models_that_run_out_of_memory_are_rows_of_the_table(tmp_path, monkeypatch, fits):
    """While they are built, or in a step."""
    import torch

    from scripts.gpu_check import speed

    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    names = ("ours, packed", "ours, padded", "transformers, sdpa", speed.models.UPSTREAM)
    fails = {name: runs_out if number % 2 else lambda _: runs_out for number, name in enumerate(names)}
    runs = {name: lambda _: lambda: torch.ones(()) for name in fits}
    monkeypatch.setattr(speed, "_ways", lambda *_: fails | runs)
    found = {one.subject: one for one in speed.compare(Place("cpu", "tiny", tmp_path, tmp_path))}
    for name in names:
        missing = name not in fits
        assert (name in found and "out of memory" in found[name].value) == missing
        assert (f"{name}: tokens a second" in found) != missing
    beside = found["ours packed beside the faster of transformers"]
    assert "out of memory" in beside.value
    assert beside.passed is (None if "ours, packed" in fits else False)
    measured = {"ours, packed: TFLOP/s", "ours, packed: MFU of forward and backward"} & found.keys()
    assert len(measured) == 1


def test_a_wait_is_attributed_to_the_line_that_waits():
    """As torch warns of it on a GPU."""
    from scripts.gpu_check.waits import noted, of_us

    warns = "import warnings\ndef wait():\n    warnings.warn('called a synchronizing CUDA operation')"
    namespaces = {}
    # The second as where it is installed in a clone, whose folder has this package's name.
    for name, folder in (("ours", ""), ("megatron-core", "/clones/qwen3vl_bridge/.venv"), ("transformers", "")):
        exec(compile(warns, f"{folder}{PACKAGES[name]}model.py", "exec"), namespaces.setdefault(name, {}))
    found = Counter()
    with noted(found):
        namespaces["ours"]["wait"]()
        namespaces["ours"]["wait"]()
        namespaces["megatron-core"]["wait"]()
        namespaces["transformers"]["wait"]()
        exec(compile(warns, "anywhere.py", "exec"), nowhere := {})
        nowhere["wait"]()
        warnings.warn("something else", stacklevel=1)
    counted = {("ours", "model.py:3"): 2, ("transformers", "model.py:3"): 1, ("others", "the caller"): 1}
    assert of_us(found) == counted  # whatever is not upstream's
    assert found == counted | {("megatron-core", "model.py:3"): 1}


def test_findings():
    assert at_most("", 1.0, 1.0).passed and at_least("", 1.0, 1.0).passed
    assert not at_most("", 1.1, 1.0).passed and not at_least("", 0.9, 1.0).passed
    assert not at_most("", float("nan"), 1.0).passed and not at_least("", float("nan"), 1.0).passed
    outcome = Outcome("a", "passed", 1.0, (Finding("b", "c", "d", True),))
    assert Outcome.of(json.loads(outcome.line)) == outcome
