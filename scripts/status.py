"""What was tested on which hardware: the README's status table, from the tests and results in the repository.

    python scripts/status.py           # write it
    python scripts/status.py --check   # exit with 1 if the README has a different table

What lives here: the features, the tests that show each on a CPU, the step of the GPU check that shows it on a GPU.
`benchmarks/results/gpu_check.jsonl`, the `results.jsonl` of `scripts/gpu_check.sh run`, fills the GPU column. Standard
library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_check.jsonl"
BEGIN, END = "<!-- status: begin -->", "<!-- status: end -->"


@dataclass(frozen=True)
class Feature:
    """A row.

    Attributes:
        name: what a user would call it.
        shown: what was shown on CPUs, in words.
        tests: paths of the tests that show it, relative to the root.
        step: name of the step of the GPU check, all parts of which have to pass; None if it has none.
    """

    name: str
    shown: str
    tests: tuple[str, ...]
    step: str | None = None


FEATURES = (
    Feature("Qwen3-VL, dense", "equal to transformers", ("tests/parity/one_process",), "parity"),
    Feature("Qwen3-VL, MoE", "equal to transformers", ("tests/parity/one_process",), "parity"),
    Feature("Qwen3.5-VL, dense and MoE", "equal to transformers", ("tests/qwen3_5/model",), "parity"),
    Feature("TP, SP, PP, VPP, CP, EP, DP", "equal to one process, on gloo", ("tests/parity/split_models",)),
    Feature(
        "Training loop, resume",
        "bit-exact",
        ("tests/training/checkpointing/test_interrupted.py", "tests/training/checkpointing/test_journeys.py"),
        "train, ten steps and resumed",
    ),
    Feature(
        "Megatron-FSDP",
        "equal to transformers, on gloo",
        ("tests/parity/split_models/test_fsdp.py",),
        "train, ten steps and resumed",
    ),
    Feature(
        "Conversion, both formats",
        "bit-exact, survives kills at any moment",
        ("tests/checkpoint/test_roundtrip.py", "tests/checkpoint/engine/test_killed.py"),
        "conversion",
    ),
    Feature("LoRA and DoRA", "equal to peft", ("tests/model/adapters", "tests/training/adapters")),
    Feature("Vision on ranks of its own", "equal to one process, on gloo", ("tests/training/encoder_parallel",)),
    Feature("Recipes of all sizes", "scaled-down copies train a step", ("tests/recipes/test_twins.py",), "train, 2B"),
    Feature("Planner of memory and time", "compared with tiny models and autograd", ("tests/planning",), "train, 2B"),
    Feature(
        "No host wait in a step",
        "counted on the CPU",
        ("tests/host_waits/test_host_waits.py",),
        "kernels and host waits",
    ),
    Feature("Speed", "compared with transformers (`docs/speed.md`)", ("benchmarks/training_step.py",), "speed"),
    Feature("verl, NeMo-RL, miles, ms-swift", "their calls are reproduced", ("tests/frameworks",)),
    Feature("Transformer Engine, NCCL on several GPUs", "not possible", ()),
)


def outcomes(file: Path) -> dict[str, str]:
    """Status of each step of a GPU check by its name; none where it has not run."""
    if not file.exists():
        return {}
    rows = (json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip())
    return {row["step"]: row["status"] for row in rows}


def table(found: dict[str, str]) -> str:
    """The table as Markdown, from the outcomes of a GPU check."""
    rows = ["| feature | on CPUs | on a GPU |", "|---|---|---|"]
    for feature in FEATURES:
        links = ", ".join(f"[{Path(test).stem}]({test})" for test in feature.tests)
        shown = f"{feature.shown}: {links}" if links else feature.shown
        rows.append(f"| {feature.name} | {shown} | {found.get(feature.step or '', 'not yet')} |")
    return "\n".join(rows)


def with_table(page: str, text: str) -> str:
    """A page with a table between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    page = readme.read_text("utf-8")
    new = with_table(page, table(outcomes(RESULTS)))
    if check and new != page:
        print("README.md has an outdated status table; run scripts/status.py", file=sys.stderr)
        return 1
    if not check:
        readme.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
