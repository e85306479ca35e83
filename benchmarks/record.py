"""Figures that benchmarks keep: rows of a CSV file, with the day and the machine.

What lives here: writing them. What may not: measuring.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to a file, which is made if it is not there."""
    stamp = {"date": datetime.date.today().isoformat(), "machine": _machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*stamp, *rows[0]])
        if new:
            writer.writeheader()
        writer.writerows(stamp | row for row in rows)


def _machine() -> str:
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} x {model}"
