"""Run a selection of the tests with other releases of megatron-core, Megatron-Bridge, transformers and torch.

    .venv/bin/python scripts/compatibility.py oldest                # the oldest versions that pyproject.toml allows
    .venv/bin/python scripts/compatibility.py newest                # the newest ones
    .venv/bin/python scripts/compatibility.py transformers          # the newest one with which Megatron-Bridge works
    .venv/bin/python scripts/compatibility.py torch                 # the newest torch
    .venv/bin/python scripts/compatibility.py main --source megatron-bridge=REPOSITORY --source megatron-core=REPOSITORY
    .venv/bin/python scripts/compatibility.py transformers==5.9.0   # versions of choice; more of them may follow

`--only upstream` runs only the tests in tests/upstream, `--record` writes a row of docs/compatibility.md. Results are
kept in out/compatibility; `--resume` continues after the last finished part of the selection. `--keep FOLDER` keeps the
environment in FOLDER/environment, for running single tests by hand.

A REPOSITORY is a folder with a Git repository, bare or not, and may end with @COMMIT. Its package is built, which needs
a C++ compiler, and installed. Packages are resolved as for requirements/cpu.txt; pins that fit are kept. Packages that
differ are installed into a separate environment, which also sees the packages of .venv. This takes seconds and a few
megabytes, but three gigabytes for torch. The oldest and the newest versions are looked up in the package registry.

Needs uv and packaging; git for `--source`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs/compatibility.md"
RESULTS = ROOT / "out/compatibility"
# The packages with a range in pyproject.toml whose two ends are tested.
BOUNDED = ("megatron-core", "megatron-bridge", "transformers")
PACKAGES = (*BOUNDED, "torch")
# megatron-bridge 0.6.2 requires at most 5.12.1, but can be imported with releases up to this one. It imports
# transformers.modeling_attn_mask_utils, which 5.24 does not contain.
NEWEST_TRANSFORMERS = "5.23.0"
ROWS = ("oldest", "newest", "transformers", "torch", "main")
# Each release of torchvision requires one release of torch.
FOLLOWS = {"torch": ("torchvision",)}
# Files of a repository that a build needs. Other files may be large, or missing in a partial clone.
SOURCE_PATHS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "megatron", "src")
# Parts of the selection, by what the packages are used for. Each part can be run alone.
SELECTION = {
    "upstream": ["-m", "upstream", "tests/upstream"],
    "hooks": ["-m", "not slow", "tests/registration"],
    "settings": [
        "tests/models/config",
        "tests/models/test_upstream_names.py",
        "tests/models/settings/test_kernel_settings.py",
        "tests/training/metrics/test_meter.py",
    ],
    "parity": ["tests/parity/test_parity.py", "tests/models/qwen3_5/test_parity.py"],
    "conversion": [
        "tests/models/weights/test_autobridge.py",
        "tests/checkpoint/test_roundtrip.py",
        "tests/models/qwen3_5/test_conversion.py",
    ],
    "data": [
        "tests/data/test_chat_template.py",
        "tests/data/test_collation.py",
        "tests/data/test_encoding.py",
        "tests/data/test_ignored_fields.py",
        "tests/data/test_released_tokenizers.py",
        "tests/data/test_samples.py",
        "tests/data/test_tokenization.py",
    ],
    "recipes": ["tests/recipes/test_recipes.py"],
    "runs": [
        "tests/training/test_run.py",
        "tests/models/qwen3_5/test_upstream_mappings.py::test_qwen3_5_run_on_ranks_exports_weights_that_it_trained",
    ],
}
NO_TESTS = 5  # pytest's exit status


@dataclass
class Result:
    """Result of one part of the selection: counts of tests, names of failed tests, and seconds."""

    counts: dict[str, int]
    failed: list[str]
    seconds: float


@dataclass
class Row:
    """One row of the table in docs/compatibility.md: package versions and test results.

    Attributes:
        name: "oldest", "newest", "transformers", "torch", "main", or "chosen" for versions given as NAME==VERSION.
        versions: version of each of `PACKAGES`, with the commit if it was built from source.
        others: other packages that had to be replaced, as NAME==VERSION.
        commit: commit of this project.
        results: results by part of the selection.
    """

    name: str
    versions: dict[str, str]
    others: list[str]
    commit: str
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Return the file in which the results are saved."""
        return RESULTS / f"{'_'.join([self.name, *self.versions.values()]).replace('/', '-').replace(' ', '-')}.json"

    def save(self) -> None:
        """Write the results to a file, so that an interrupted run can continue."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self, default=vars, indent=1) + "\n")

    def load(self) -> None:
        """Read the results of an earlier run with the same commit and versions, if there are any."""
        if not self.path.is_file():
            return
        kept = json.loads(self.path.read_text())
        if kept["commit"] == self.commit and kept["others"] == self.others:
            self.results = {part: Result(**one) for part, one in kept["results"].items()}

    def summary(self) -> str:
        """Return a text with the counts over all parts, the parts that were not run, and the replaced packages."""
        counts: dict[str, int] = {}
        for result in self.results.values():
            for word, count in result.counts.items():
                counts[word] = counts.get(word, 0) + count
        words = ", ".join(f"{counts[word]} {word}" for word in sorted(counts)) or "no tests"
        if missing := [part for part in SELECTION if part not in self.results]:
            words += "; not run: " + ", ".join(missing)
        # torch requires certain releases of NVIDIA's libraries.
        others = [one for one in self.others if not one.startswith(("nvidia-", "cuda-"))]
        return words + (f"; with {', '.join(others)}" if others else "")


def allowed() -> dict[str, Requirement]:
    """Return what pyproject.toml requires of the packages in `BOUNDED`, by name."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = {one.name: one for one in map(Requirement, listed)}
    return {name: found[name] for name in BOUNDED}


def uv(*arguments: str, asked: str | None = None, folder: Path = ROOT) -> str:
    """Run uv with the standard input `asked`, and return its output."""
    command = [sys.executable, "-m", "uv", *arguments, "--quiet", "--system-certs"]
    # Without this variable, megatron-bridge's build adds the commit of whatever Git repository contains its sources.
    environment = os.environ | {"NO_VCS_VERSION": "1"}
    done = subprocess.run(
        command, input=asked, stdout=subprocess.PIPE, text=True, check=True, cwd=folder, env=environment
    )
    return done.stdout


def ask_registry(requirements: list[str], resolution: str) -> dict[str, str]:
    """Return the lowest or highest version in the package registry that meets each requirement, by package name."""
    options = ["--no-deps", "--no-header", "--no-annotate", "--resolution", resolution, "--python", sys.executable, "-"]
    lines = uv("pip", "compile", *options, asked="\n".join(requirements)).split()
    return dict(line.split("==") for line in lines)


def chosen_versions(which: list[str], *, beyond: bool = False) -> tuple[str, dict[str, str]]:
    """Return the name of the row and the versions that differ from the pinned ones.

    Args:
        which: one of `ROWS`, or NAME==VERSION of some packages.
        beyond: allow versions outside the ranges of pyproject.toml.
    """
    ranges = allowed()
    match which:
        case ["oldest"]:
            return "oldest", ask_registry(list(map(str, ranges.values())), "lowest")
        case ["newest"]:
            return "newest", ask_registry(list(map(str, ranges.values())), "highest")
        case ["transformers"]:
            return "transformers", {"transformers": NEWEST_TRANSFORMERS}
        case ["torch"]:
            return "torch", ask_registry(["torch"], "highest")
        case ["main"]:
            return "main", {}
    versions = {}
    for one in which:
        name, _, number = one.partition("==")
        if name not in PACKAGES or not number:
            raise SystemExit(
                f"{one}: expected one of {', '.join(ROWS)}, or one of {', '.join(PACKAGES)} as NAME==VERSION"
            )
        inside = name not in ranges or ranges[name].specifier.contains(number, prereleases=True)
        if not inside and not beyond:
            raise SystemExit(f"{one}: pyproject.toml allows {ranges[name]}; --beyond tests it all the same")
        versions[name] = number
    return "chosen", versions


def export_source(repository: str, target: Path) -> str:
    """Write the files of a package from a Git repository to `target` and return the commit."""
    path, _, commit = repository.partition("@")
    git = ["git", "-C", path]
    asked = [*git, "rev-parse", "--short=9", f"{commit or 'HEAD'}^{{commit}}"]
    found = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    listed = subprocess.run([*git, "ls-tree", "--name-only", found], stdout=subprocess.PIPE, text=True, check=True)
    wanted = [name for name in listed.stdout.splitlines() if name in SOURCE_PATHS]
    archive = target.with_suffix(".tar")
    subprocess.run([*git, "archive", f"--output={archive}", found, *wanted], check=True)
    target.mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(target)], check=True)
    return found


def replace_lines(text: str, wanted: dict[str, str], without: tuple[str, ...] = ()) -> str:
    """Return the text of a requirements file with changed lines.

    The line of a package in `wanted` is replaced by the given line, and the line of a package in `without` by only its
    name.
    """
    lines = []
    for line in text.splitlines():
        try:
            name = Requirement(line.partition(" #")[0]).name
        except InvalidRequirement:
            name = ""
        lines.append(wanted.get(name, name if name in without else line))
    return "\n".join(lines) + "\n"


def resolve(wanted: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the requirement of each package by name: the pins of cpu.txt, except those that `wanted` changes.

    Args:
        wanted: requirements by name, as NAME==VERSION or NAME @ file://....
        folder: where to write uv's input.
    """
    requirements = ROOT / "requirements"
    followers = tuple(one for name in wanted for one in FOLLOWS.get(name, ()))
    (folder / "cpu.in").write_text(replace_lines((requirements / "cpu.in").read_text(), wanted, followers))
    overrides = replace_lines((requirements / "overrides.txt").read_text(), wanted)
    # An override replaces what other packages require. So a release of transformers can be tested that Megatron-Bridge
    # does not allow. torch is not overridden, because torchvision requires the release that it was built for.
    overrides += f"{wanted['transformers']}\n" if "transformers" in wanted else ""
    (folder / "overrides.txt").write_text(overrides)
    # uv keeps those pins of its output file that still fit.
    pins = folder / "cpu.txt"
    pins.write_text((requirements / "cpu.txt").read_text())
    options = ["--override", "overrides.txt", "--output-file", str(pins), "--no-header", "--no-annotate"]
    uv("pip", "compile", "cpu.in", *options, "--python", sys.executable, folder=folder)
    lines = [line.partition(" ;")[0] for line in pins.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(Requirement(line).name): line for line in lines}


def is_installed(requirement: str) -> bool:
    """Return True if .venv has exactly the version of a requirement."""
    name, equals, number = requirement.partition("==")
    try:
        return bool(equals) and version(name) == number
    except PackageNotFoundError:
        return False


def make_environment(folder: Path, requirements: list[str]) -> Path:
    """Make an environment with these packages in front of the packages of .venv, and return its Python executable."""
    venv.create(folder)
    (site,) = folder.glob("lib/python3.*/site-packages")
    beside = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    # A line with only a path would not read the .pth files in that folder, which name this project's folders.
    (site / "beside.pth").write_text("".join(f"import site; site.addsitedir({str(path)!r})\n" for path in beside))
    python = folder / "bin/python"
    if requirements:
        uv("pip", "install", "--python", str(python), "--no-deps", *requirements)
    return python


def installed_versions(python: Path) -> dict[str, str]:
    """Return the version of each of `PACKAGES` in an environment."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {PACKAGES}}}))"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def prepare(options: argparse.Namespace, folder: Path) -> tuple[Row, Path]:
    """Make the environment of a row. Return the row without results, and the Python executable of the environment."""
    name, versions = chosen_versions(options.which, beyond=options.beyond)
    wanted = {package: f"{package}=={number}" for package, number in versions.items()}
    commits = {}
    for one in options.source:
        package, _, repository = one.partition("=")
        if package not in PACKAGES or not repository:
            raise SystemExit(f"--source {one}: expected NAME=REPOSITORY with a NAME of {', '.join(PACKAGES)}")
        commits[package] = export_source(repository, folder / package)
        wanted[package] = f"{package} @ file://{folder / package}"
    if name == "main" and not commits:
        raise SystemExit("main: expected --source megatron-bridge=REPOSITORY --source megatron-core=REPOSITORY")
    resolved = resolve(wanted, folder)
    laid = {one: requirement for one, requirement in resolved.items() if not is_installed(requirement)}
    python = make_environment(folder / "environment", list(laid.values()))
    found = installed_versions(python)
    found |= {package: f"{found[package]} ({commit})" for package, commit in commits.items()}
    followers = [one for package in wanted for one in FOLLOWS.get(package, ())]
    others = [requirement for one, requirement in laid.items() if one not in (*PACKAGES, *followers)]
    words = ["git", "rev-parse", "--short=9", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return Row(name, found, others, commit), python


def run_tests(python: Path, arguments: list[str]) -> Result:
    """Run pytest, show its output, and return the counts and the names of failed tests."""
    start, lines = time.monotonic(), []
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout
        for line in tests.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    last = lines[-1] if lines else ""
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)", last)
    counts = {word.removesuffix("s"): int(count) for count, word in found}
    reported = (line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR ")))
    failed = [line.partition(" - ")[0].strip() for line in reported]
    if tests.returncode not in (0, 1, NO_TESTS) and not failed:
        # pytest has crashed or rejected its arguments, which the counts do not show.
        counts["error"] = counts.get("error", 0) + 1
        failed = [f"pytest {' '.join(arguments)}: exit status {tests.returncode}"]
    return Result(counts, failed, time.monotonic() - start)


def record(row: Row, table: Path = TABLE) -> None:
    """Write a row into the table. Replace rows with the same versions, or with the same name unless it is "chosen"."""
    versions = [row.versions[name] for name in PACKAGES]
    cells = [row.name, *versions, row.summary(), f"{datetime.now(UTC):%Y-%m-%d}", row.commit]
    lines = table.read_text().splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("| row | ")]
    end = head + 2
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[head + 2 : end]]
    named = row.name in ROWS
    kept = [one for one in rows if one[1:5] != versions and not (named and one[0] == row.name)]
    order = (*ROWS, "chosen")
    kept = sorted([*kept, cells], key=lambda one: order.index(one[0]))  # rows with the same name keep their order
    lines[head + 2 : end] = ["| " + " | ".join(one) + " |" for one in kept]
    table.write_text("\n".join(lines) + "\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", metavar="WHICH", help=f"{', '.join(ROWS)}, or NAME==VERSION ...")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=REPOSITORY[@COMMIT]")
    parser.add_argument("--beyond", action="store_true", help="allow versions outside the ranges of pyproject.toml")
    parser.add_argument("--only", action="append", choices=SELECTION, metavar="PART", help=", ".join(SELECTION))
    parser.add_argument("--resume", action="store_true", help="skip parts that were finished with the same commit")
    parser.add_argument("--record", action="store_true", help=f"write a row of {TABLE.relative_to(ROOT)}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder, in which the environment is left")
    return parser


def run_row(options: argparse.Namespace, folder: Path) -> Row:
    """Make the environment of a row in `folder`, run the selection and return the row with its results."""
    row, python = prepare(options, folder)
    print("compatibility:", ", ".join(f"{name} {number}" for name, number in row.versions.items()), flush=True)
    if row.others:
        print("compatibility: besides", ", ".join(row.others), flush=True)
    if options.resume:
        row.load()
    for part in options.only or SELECTION:
        if part in row.results:
            continue
        print(f"compatibility: {part}", flush=True)
        row.results[part] = run_tests(python, SELECTION[part])
        row.save()
    return row


def main(arguments: list[str] | None = None) -> int:
    """Run the selection of tests, and return the exit status: 1 if a test fails."""
    options = make_parser().parse_args(arguments)
    if options.keep:
        options.keep.mkdir(parents=True)
        row = run_row(options, options.keep.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            row = run_row(options, Path(folder))
    failed = [name for result in row.results.values() for name in result.failed]
    for name in failed:
        print("compatibility: failed:", name)
    seconds = sum(result.seconds for result in row.results.values())
    print(f"compatibility: {row.summary()}, {seconds:.0f} s")
    if options.record:
        record(row)
    return int(bool(failed) or not any(result.counts.get("passed") for result in row.results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
