"""What was tested on which hardware: the README's status table, from the tests and results in the repository.

    python scripts/status.py                      # write it
    python scripts/status.py --check              # exit with 1 if the README has a different table
    python scripts/status.py --record JUNIT.xml   # store the outcome of tests on a CPU, then write it (needs pytest)

Contents: the features, the tests that show each on a CPU, the step of the GPU check that shows it on a GPU.
`benchmarks/results/cpu_tests.jsonl`, made from `make test-full PYTEST_ARGS=--junitxml=JUNIT.xml`, or from several runs
which together run every test (JUNIT.xml@COMMIT for one of an earlier commit), fills the CPU column;
`benchmarks/results/gpu_check.jsonl`, the `results.jsonl` of `scripts/gpu_check.sh run`, fills the GPU column. Standard
library only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CPU, GPU = RESULTS / "cpu_tests.jsonl", RESULTS / "gpu_check.jsonl"
BEGIN, END = "<!-- status: begin -->", "<!-- status: end -->"


@dataclass(frozen=True)
class Feature:
    """A row.

    Attributes:
        name: what a user would call it.
        shown: what was shown on CPUs, in words.
        tests: paths of the tests that show it, relative to the root.
        step: name of the step of the GPU check, all parts of which have to pass; None if it has none.
        scope: what the step covers, if that is less than the feature.
        estimated: what was only simulated or estimated, with a link to the page.
    """

    name: str
    shown: str
    tests: tuple[str, ...]
    step: str | None = None
    scope: str = ""
    estimated: str = ""


@dataclass(frozen=True)
class Recorded:
    """The outcome of the tests under a path.

    Attributes:
        path: a file or a folder of tests, relative to the root.
        passed: number of passed tests.
        failed: number of failed tests and errors.
        skipped: number of skipped tests.
        date: day of the run, UTC.
        commit: abbreviated commits that were tested, separated by spaces.
    """

    path: str
    passed: int
    failed: int
    skipped: int
    date: str
    commit: str

    @property
    def words(self) -> str:
        """For the table."""
        counts = {"failed": self.failed, "passed": self.passed, "skipped": self.skipped}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


FEATURES = (
    Feature("Qwen3-VL, dense", "equal to transformers", ("tests/parity/one_process",), "parity", "tiny model"),
    Feature("Qwen3-VL, MoE", "equal to transformers", ("tests/parity/one_process",), "parity", "tiny model"),
    Feature("Qwen3.5-VL, dense and MoE", "equal to transformers", ("tests/qwen3_5/model",), "parity", "tiny model"),
    Feature("TP, SP, PP, VPP, CP, EP, DP", "equal to one process, on gloo", ("tests/parity/split_models",)),
    Feature(
        "Training loop, resume",
        "bit-exact",
        ("tests/training/checkpointing/test_interrupted.py", "tests/training/checkpointing/test_journeys.py"),
        "train, ten steps and resumed",
        "tiny model",
    ),
    Feature(
        "Megatron-FSDP",
        "equal to transformers, on gloo",
        ("tests/parity/split_models/test_fsdp.py",),
        "train, ten steps and resumed",
        "tiny model, one GPU",
    ),
    Feature(
        "Conversion, both formats",
        "bit-exact, survives kills at any moment",
        ("tests/checkpoint/test_roundtrip.py", "tests/checkpoint/engine/test_killed.py"),
        "conversion",
        "2B",
    ),
    Feature("LoRA and DoRA", "equal to peft", ("tests/model/adapters", "tests/training/adapters")),
    Feature(
        "Separate vision ranks",
        "equal to one process, on gloo",
        ("tests/training/encoder_parallel",),
        estimated="number of ranks, memory: [dist_train](docs/dist_train.md)",
    ),
    Feature(
        "Packing, load balance",
        "a sample gives the same result packed and padded",
        ("tests/data/packing", "tests/parity/one_process/test_rows_and_packed.py"),
        estimated="idle time of 64 ranks: [packing](docs/packing.md)",
    ),
    Feature(
        "Recipes of all sizes",
        "scaled-down copies train a step",
        ("tests/recipes/test_twins.py",),
        "train, 2B",
        "2B, one GPU",
        "memory, GPUs needed: [recipes](docs/recipes.md)",
    ),
    Feature(
        "Planner of memory and time",
        "compared with tiny models and autograd",
        ("tests/planning",),
        "train, 2B",
        "memory of the 2B",
        "everything that it prints: [memory](docs/memory.md)",
    ),
    Feature(
        "No host wait in a step",
        "counted on the CPU",
        ("tests/host_waits/test_host_waits.py",),
        "kernels and host waits",
        "tiny models",
    ),
    Feature("Speed", "compared with transformers (`docs/speed.md`)", ("benchmarks/training_step.py",), "speed", "2B"),
    Feature("verl, NeMo-RL, miles, ms-swift", "their calls are reproduced", ("tests/frameworks",)),
    Feature("Transformer Engine, NCCL on several GPUs", "not possible", ()),
)


def outcomes(file: Path) -> dict[str, str]:
    """Status of each step of a GPU check by its name; empty if it has not run."""
    return {row["step"]: row["status"] for row in _lines(file)}


def recorded(file: Path) -> dict[str, Recorded]:
    """Outcomes of tests on a CPU by their paths."""
    return {row["path"]: Recorded(**row) for row in _lines(file)}


def _lines(file: Path) -> list[dict]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]


def read_junit(files: dict[Path, str], collected: list[str]) -> list[Recorded]:
    """The outcome of every path of `FEATURES` of which all tests ran.

    Args:
        files: what `pytest --junitxml` wrote, with the commits that were tested, the newest last: it counts where a
            test ran twice.
        collected: node ids of all tests below the paths, slow ones too.
    """
    ran = {
        (one.get("classname", ""), one.get("name", "")): (commit, {child.tag for child in one})
        for file, commit in files.items()
        for one in ET.parse(file).iter("testcase")
    }
    date, found = f"{datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC):%Y-%m-%d}", []
    for path in _paths():
        names = [_junit_name(one) for one in collected if one.startswith((f"{path}::", f"{path}/"))]
        if not names or not all(name in ran for name in names):
            continue
        failed = sum(bool(ran[name][1] & {"failure", "error"}) for name in names)
        skipped = sum("skipped" in ran[name][1] for name in names)
        tested = {ran[name][0] for name in names}
        commits = " ".join(commit for commit in dict.fromkeys(files.values()) if commit in tested)
        found.append(Recorded(path, len(names) - failed - skipped, failed, skipped, date, commits))
    return found


def _paths() -> list[str]:
    return list(dict.fromkeys(test for feature in FEATURES for test in feature.tests if test.startswith("tests/")))


def _junit_name(node: str) -> tuple[str, str]:
    """Class and name by which JUnit files call the test of a node id (`tests/a/test_b.py::Class::test_c[x]`)."""
    file, _, case = node.partition("::")
    outer, parameters = case.partition("[")[::2]
    *classes, name = outer.split("::")
    return ".".join([_dotted(file), *classes]), name + ("[" + parameters if parameters else "")


def _collected() -> list[str]:
    """Node ids of all tests of the features; pytest leaves no slow ones out where paths are named."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *_paths()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pytest could not collect the tests:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def _dotted(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


def record(files: list[str]) -> None:
    """Put the outcomes of runs of pytest (FILE, FILE@COMMIT) into `CPU`, in place of earlier ones of the same paths."""
    words = ["git", "rev-parse", "--short=9", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    runs = {Path(file): of or commit for file, _, of in (file.partition("@") for file in files)}
    rows = recorded(CPU) | {one.path: one for one in read_junit(runs, _collected())}
    known = [test for feature in FEATURES for test in feature.tests]
    CPU.write_text("".join(json.dumps(asdict(rows[path])) + "\n" for path in sorted(rows) if path in known), "utf-8")


def table(on_cpu: dict[str, Recorded], on_gpu: dict[str, str]) -> str:
    """The table as Markdown, from the recorded tests and the outcomes of a GPU check."""
    rows = ["| feature | on CPUs | on a GPU | simulated or estimated |", "|---|---|---|---|"]
    for feature in FEATURES:
        links = ", ".join(_link(test, on_cpu) for test in feature.tests)
        cpu = f"{feature.shown}: {links}" if links else feature.shown
        gpu = on_gpu.get(feature.step or "", "not yet")
        gpu += f" ({feature.scope})" if feature.scope and gpu != "not yet" else ""
        rows.append(f"| {feature.name} | {cpu} | {gpu} | {feature.estimated} |")
    return "\n".join([*rows, "", _sources(on_cpu)])


def _link(test: str, on_cpu: dict[str, Recorded]) -> str:
    link = f"[{Path(test).stem}]({test})"
    if not test.startswith("tests/"):
        return link
    return f"{link} {on_cpu[test].words if test in on_cpu else 'no run recorded'}"


def _sources(on_cpu: dict[str, Recorded]) -> str:
    dates: dict[str, set[str]] = {}
    for one in on_cpu.values():
        dates.setdefault(one.date, set()).update(one.commit.split())
    runs = "; ".join(f"{date} at commits {', '.join(sorted(commits))}" for date, commits in sorted(dates.items()))
    return f"`scripts/status.py` writes this table. The numbers are tests of recorded runs on CPUs ({runs or 'none'})."


def with_table(page: str, text: str) -> str:
    """A page with a table between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument(
        "--record", nargs="+", metavar="JUNIT", help="what `pytest --junitxml` wrote; @COMMIT for another one"
    )
    options = parser.parse_args()
    if options.record:
        record(options.record)
    readme = ROOT / "README.md"
    page = readme.read_text("utf-8")
    new = with_table(page, table(recorded(CPU), outcomes(GPU)))
    if options.check and new != page:
        print("README.md has an outdated status table; run scripts/status.py", file=sys.stderr)
        return 1
    if not options.check:
        readme.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
