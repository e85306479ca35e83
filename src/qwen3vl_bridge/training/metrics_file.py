"""The log of a run as a file: one JSON object per line.

What lives here: its name, the format of an entry, and reading it back. What may not: the contents of an entry.
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
    """An entry as it is written; numbers that are not finite are null, because JSON does not have them."""
    return json.dumps({name: _or_null(value) for name, value in entry.items()}, allow_nan=False) + "\n"


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """A run's entries so far; empty if it has no such file. A truncated line is skipped."""
    path, entries = folder / METRICS, []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(parse_record(line))
        except ValueError:
            continue
    return entries
