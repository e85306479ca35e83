"""What steps found: findings, a line of JSON for each step, and the table for people.

What lives here: their form. Standard library only. What may not: running steps (`runner.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS, SUMMARY, LOGS = "results.jsonl", "summary.md", "logs.txt"


@dataclass(frozen=True)
class Place:
    """Where a step works.

    Attributes:
        device: "cuda" or "cpu".
        size: "full", or "tiny" for a rehearsal.
        work: folder for what is large and is left behind.
        out: folder for what is kept.
    """

    device: str
    size: str
    work: Path
    out: Path


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        subject: what was measured.
        value: what came out.
        limit: what it was held against, in words; empty for a figure alone.
        passed: whether it held; None for a figure alone.
    """

    subject: str
    value: str
    limit: str = ""
    passed: bool | None = None


def at_most(subject: str, value: float, limit: float) -> Finding:
    """A value that must not be above its limit; what is no number is above any."""
    return Finding(subject, f"{value:.2g}", f"at most {limit:.2g}", math.isfinite(value) and value <= limit)


def at_least(subject: str, value: float, limit: float) -> Finding:
    """A value that must not be below its limit."""
    return Finding(subject, f"{value:.3g}", f"at least {limit:.3g}", math.isfinite(value) and value >= limit)


@dataclass(frozen=True)
class Outcome:
    """One step.

    Attributes:
        step: its name.
        status: "passed"; "failed", by a finding or an error; "timed out".
        seconds: that it took.
        findings: in order.
        error: the last lines of its log, where it broke.
    """

    step: str
    status: str
    seconds: float
    findings: tuple[Finding, ...] = ()
    error: str = ""

    @property
    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: dict[str, Any]) -> Outcome:
        """From JSON."""
        return cls(**line | {"findings": tuple(Finding(**one) for one in line["findings"])})


def read(out: Path) -> dict[str, Outcome]:
    """The newest outcome of each step."""
    path = out / RESULTS
    lines = path.read_text().splitlines() if path.exists() else []
    outcomes = (Outcome.of(json.loads(line)) for line in lines)
    return {one.step: one for one in outcomes}


def write_summary(out: Path, outcomes: Sequence[Outcome]) -> str:
    """Write the table, and give it."""
    lines = ["| step | subject | measured | limit | held |", "|---|---|---|---|---|"]
    for one in outcomes:
        lines.append(f"| **{one.step}** | {one.seconds:.0f} s | | | {one.status} |")
        lines += [f"| | {_row(finding)} |" for finding in one.findings]
        if one.error:
            lines.append(f"| | {_cell(one.error)} | | | |")
    text = "\n".join(lines) + "\n"
    (out / SUMMARY).write_text(text)
    return text


def _row(one: Finding) -> str:
    held = {True: "yes", False: "NO", None: ""}[one.passed]
    return " | ".join(map(_cell, (one.subject, one.value, one.limit, held)))


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("\n", "<br>")
