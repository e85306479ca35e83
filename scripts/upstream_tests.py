"""Run Megatron-Bridge's own unit tests against this project's classes, and compare failures with the known failures.

    python scripts/upstream_tests.py --source CHECKOUT

CHECKOUT is a clone of Megatron-Bridge at the installed release; its tests are run in place. Names that they import from
`megatron.bridge.models.qwen_vl` are replaced by this project's classes (`upstream/replacement.py`). GPUs and the hub
are switched off. Known failures and their reasons are in `upstream/failures.toml`.

The exit status is 0 if exactly the known failures fail, and 1 if another test fails or a known failure passes. Tests
that are listed because this machine lacks something may pass on another machine, which is only printed. With `--stock`
nothing is replaced, and only these tests may fail.

In addition to the project's environment this needs the package diffusers, which Megatron-Bridge's recipes import.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent / "upstream"
FAILURES = HERE / "failures.toml"
UNIT = "tests/unit_tests"
# Tests of Qwen3-VL, conversion and recipes that run without a GPU.
TESTS = (
    "models/qwen_vl",
    "data",
    "conversion",
    "recipes",
    "inference/vlm",
    "scripts/training",
    "models/test_auto_bridge.py",
    "models/test_autobridge_registration_matrix.py",
    "models/test_model_bridge.py",
    "models/test_model_bridge_lora.py",
    "models/test_adapter_export.py",
)
KINDS = {
    "machine": "fails without the plugin too: this machine lacks something",
    "private": "tests internals of Megatron-Bridge's own class",
    "intended": "an intended difference",
    "defect": "a defect of ours",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the tests and compare failures with the known ones; return the exit status."""
    args = _parser().parse_args(arguments)
    entries = read_failures()
    if not (args.source / UNIT).is_dir():
        raise SystemExit(f"{args.source} has no {UNIT}, expected a checkout of Megatron-Bridge")
    if importlib.util.find_spec("diffusers") is None and not args.tests:
        print("diffusers is not installed: upstream's recipes cannot be imported, and their tests will fail")
    outcomes = run(args.source.resolve(), [f"{UNIT}/{test}" for test in args.tests or TESTS], args.stock, args.workers)
    wrong = compare(outcomes, entries, stock=args.stock, whole=not args.tests)
    counts = {
        kind: sum(test["outcome"] == kind for test in outcomes.values()) for kind in ("passed", "failed", "skipped")
    }
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    print("\n".join(wrong) or "as listed")
    return int(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkout of Megatron-Bridge")
    parser.add_argument("--stock", action="store_true", help="without replacement: what fails on this machine anyway")
    parser.add_argument("--workers", type=int, default=0, help="processes that run tests (pytest-xdist)")
    parser.add_argument("tests", nargs="*", help=f"paths below {UNIT} instead of all")
    return parser


def read_failures() -> list[dict]:
    """Return the known failures in `failures.toml`: kind, reason, and names of test files, classes, tests or cases."""
    entries = tomllib.loads(FAILURES.read_text())["failure"]
    for entry in entries:
        if entry["kind"] not in KINDS or not entry["why"] or not entry["tests"]:
            raise ValueError(f"{entry} in {FAILURES.name}, expected kind (one of {', '.join(KINDS)}), why and tests")
    return entries


def run(source: Path, tests: list[str], stock: bool, workers: int) -> dict[str, dict[str, str]]:
    """Run tests of a checkout with pytest, and return the outcome and the error of each test by its name."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *_without_root(os.environ.get("PYTHONPATH", ""))]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    if stock:
        environment["UPSTREAM_TESTS_STOCK"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        report, settings = Path(folder) / "report.json", Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\n")  # replaces the settings of both projects
        command = [sys.executable, "-m", "pytest", "-p", "replacement", "-p", "no:cacheprovider", "-q", "--tb=line"]
        command += ["-c", str(settings), "--rootdir", str(source), "--continue-on-collection-errors", "-W", "ignore"]
        command += ["--report", str(report), *(["--stock"] if stock else []), "-n", str(workers), *tests]
        status = subprocess.run(command, cwd=source, env=environment).returncode
        if not report.exists():
            raise SystemExit(f"pytest ended with {status} before it had run the tests")
        return json.loads(report.read_text())


def _without_root(paths: str) -> list[str]:
    """Return the folders in PYTHONPATH, except folders with a `tests` folder, which would hide the checkout's tests."""
    return [path for path in paths.split(os.pathsep) if path and not (Path(path) / "tests").is_dir()]


def compare(outcomes: dict[str, dict[str, str]], entries: list[dict], *, stock: bool, whole: bool) -> list[str]:
    """Return a message for each test that fails and is not listed, and for each listed test that does not fail.

    Tests that an entry of kind `machine` lists may fail. Tests that other entries list must fail.

    Args:
        outcomes: outcome and error of each test.
        entries: entries of `failures.toml`.
        stock: no class was replaced, so only entries of kind `machine` count.
        whole: all tests were run, so that tests of every entry must be among the outcomes.
    """
    wrong, listed = [], set()
    for entry in (entry for entry in entries if not stock or entry["kind"] == "machine"):
        for name in entry["tests"]:
            covered = {test: found["outcome"] for test, found in outcomes.items() if covers(name, test)}
            listed |= covered.keys()
            if entry["kind"] == "machine":
                if covered and "failed" not in covered.values():
                    print(f"passes on this machine: {name}")
            elif "passed" in covered.values() or ("failed" not in covered.values() and (whole or covered)):
                wrong.append(f"listed, and no longer fails: {name}")
    for test, found in outcomes.items():
        if found["outcome"] == "failed" and test not in listed:
            wrong.append(f"not listed, and fails: {test.removeprefix(UNIT + '/')}: {found['why'].strip()[:300]}")
    return wrong


def covers(name: str, test: str) -> bool:
    """Return True if `name`, from an entry, is the name of a test, or of the test's class, file or folder."""
    test = test.removeprefix(UNIT + "/")
    return test == name or any(test.startswith(name + mark) for mark in ("/", "::", "["))


if __name__ == "__main__":
    sys.exit(main())
