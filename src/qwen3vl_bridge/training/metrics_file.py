"""The log of a run as a file: one JSON object a line.

What lives here: its name, how an entry is written, and reading it back. What may not: what is in an entry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.files.parsing import parse_record

METRICS = "metrics.jsonl"


def metrics_line(entry: Mapping[str, Any]) -> str:
    """An entry as it is written; what is no finite number is null, because JSON has no other numbers."""
    return json.dumps({name: _or_null(value) for name, value in entry.items()}, allow_nan=False) + "\n"


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """A run's entries so far; none where it has no such file. A line that was cut off is left out."""
    path, entries = folder / METRICS, []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(parse_record(line))
        except ValueError:
            continue
    return entries
