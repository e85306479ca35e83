"""The oldest and the newest megatron-core, Megatron-Bridge and transformers that pyproject.toml allows, in a few tests.

    .venv/bin/python scripts/compatibility.py oldest            # or newest
    .venv/bin/python scripts/compatibility.py transformers==5.9.0
    .venv/bin/python scripts/compatibility.py oldest --record   # a row of docs/compatibility.md

Which versions these are is asked of the package registry, so no list of them grows old here. They are installed,
without what they ask for, into an environment of their own that otherwise sees the packages of .venv: seconds, and a
few megabytes. Where they do not allow a pinned version of another package, one that they allow is put before it.

Needs uv, pip and packaging.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("megatron-core", "megatron-bridge", "transformers")
TABLE = ROOT / "docs/compatibility.md"
# What the three are used for: registration and patches, reading configurations, parity, both formats, templates and
# processors, recipes, and whole runs that save and go on.
SELECTION = [
    "tests/compat/test_hooks.py",
    "tests/model/config",
    "tests/model/weights/test_autobridge.py",
    "tests/parity/one_process/test_parity.py",
    "tests/qwen3_5/model/test_parity.py",
    "tests/checkpoint/test_roundtrip.py",
    "tests/qwen3_5/test_conversion.py",
    "tests/data/processing",
    "tests/recipes/test_recipes.py",
    "tests/training/test_run.py",
    "tests/qwen3_5/test_upstream_mappings.py::test_runs_train_save_and_are_exported",
]


def allowed() -> dict[str, Requirement]:
    """The ranges of the three packages in pyproject.toml."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = {one.name: one for one in map(Requirement, listed)}
    return {name: found[name] for name in PACKAGES}


def chosen_versions(which: list[str]) -> dict[str, str]:
    """The version of each of the three, by "oldest", "newest", or NAME==VERSION of some and what is installed."""
    ranges = allowed()
    if which in (["oldest"], ["newest"]):
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            "--quiet",
            "--system-certs",
            "--no-deps",
            "--no-header",
        ]
        command += ["--no-annotate", "--resolution", "lowest" if which == ["oldest"] else "highest"]
        command += ["--python", sys.executable, "-"]
        asked = "\n".join(map(str, ranges.values()))
        done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True)
        return dict(line.split("==") for line in done.stdout.split())
    versions = {name: version(name) for name in PACKAGES}
    for one in which:
        name, _, number = one.partition("==")
        if name not in ranges or not number:
            raise SystemExit(f"{one}: expected oldest, newest, or one of {', '.join(PACKAGES)} as NAME==VERSION")
        if not ranges[name].specifier.contains(number, prereleases=True):
            raise SystemExit(f"{one}: pyproject.toml allows {ranges[name]}")
        versions[name] = number
    return versions


def make_environment(folder: Path, versions: dict[str, str]) -> Path:
    """An environment that has these versions before those of this one; returns its Python."""
    venv.create(folder)
    (site,) = folder.glob("lib/python3.*/site-packages")
    beside = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    (site / "beside.pth").write_text("".join(f"{path}\n" for path in beside))
    python = folder / "bin/python"
    # What is the same as here is not laid over itself.
    laid = [f"{name}=={number}" for name, number in versions.items() if number != version(name)]
    if laid:
        install(python, laid)
    return python


def install(python: Path, wanted: list[str]) -> None:
    """Install packages into an environment, without what they ask for."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--ignore-installed", "--no-deps", *wanted], check=True)


def conflicts(python: Path) -> list[Requirement]:
    """What the three ask for that is there in a version they do not allow.

    What is not there at all was left out on purpose: requirements/overrides.txt names it.
    """
    code = (
        "import json; from importlib.metadata import requires, distributions\n"
        f"print(json.dumps([[one for name in {PACKAGES} for one in requires(name) or ()],"
        # The first of a name on the path is the one that is imported.
        " {one.name: one.version for one in reversed(list(distributions()))}]))"
    )
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    asked, there = json.loads(done.stdout)
    versions = {canonicalize_name(name): number for name, number in there.items()}
    applies = [one for one in map(Requirement, asked) if one.marker is None or one.marker.evaluate({"extra": ""})]
    found = [(one, versions.get(canonicalize_name(one.name))) for one in applies]
    return [one for one, number in found if number and not one.specifier.contains(number, prereleases=True)]


def settle(python: Path) -> list[str]:
    """Install what `conflicts` finds in a version that is allowed; what that was."""
    wanted = [str(one) for one in conflicts(python)]
    if wanted:
        install(python, wanted)
    if still := conflicts(python):
        raise SystemExit(
            f"compatibility: no version of these packages satisfies all three: {', '.join(map(str, still))}"
        )
    return wanted


def run_selection(python: Path) -> tuple[str, float]:
    """What pytest's last line says of the selection, and how many seconds it took."""
    start = time.monotonic()
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *SELECTION]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout
        for line in tests.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    summary = re.sub(r"(, \d+ warnings?)? in [\d.]+s.*", "", lines[-1]).strip(" =\n") if lines else "nothing"
    return summary, time.monotonic() - start


def record(versions: dict[str, str], said: str) -> None:
    """Put a row for these versions into the table of docs/compatibility.md, in place of an earlier one."""
    key = "| " + " | ".join(versions[name] for name in PACKAGES) + " |"
    words = ["git", "rev-parse", "--short=9", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith(key)]
    last = max(number for number, line in enumerate(lines) if line.startswith("|"))
    lines.insert(last + 1, f"{key} {version('torch')} | {said} | {datetime.now(UTC):%Y-%m-%d} | {commit} |")
    TABLE.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Exit status 1 where a test fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", metavar="WHICH", help="oldest, newest, or NAME==VERSION ...")
    parser.add_argument("--record", action="store_true", help=f"add a row to {TABLE.relative_to(ROOT)}")
    options = parser.parse_args()
    versions = chosen_versions(options.which)
    print("compatibility:", ", ".join(f"{name} {number}" for name, number in versions.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder), versions)
        others = settle(python)
        if others:
            print("compatibility: besides", ", ".join(others), flush=True)
        said, seconds = run_selection(python)
    print(f"compatibility: {said}, {seconds:.0f} s")
    if options.record:
        record(versions, said + "".join(f"; with {one}" for one in others))
    return int("failed" in said or "error" in said or "passed" not in said)


if __name__ == "__main__":
    raise SystemExit(main())
