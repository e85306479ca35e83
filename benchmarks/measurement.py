"""Share functions between benchmarks: append to CSV files, measure in interleaved rounds, build a model."""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parser(doc: str | None, results: str, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with `--csv` (default: the file `results`) and, if `rounds` is given, `--rounds`."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument("--csv", type=Path, default=RESULTS / results, help="file to append to (default: %(default)s)")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    return made


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows with date and machine to a CSV file, which is created if necessary."""
    stamp = {"date": datetime.date.today().isoformat(), "machine": _machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*stamp, *rows[0]], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(stamp | dict(row) for row in rows)


def _machine() -> str:
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} x {model}"


def load() -> str:
    """Return the load average of the last minute. If it exceeds the number of cores, only ratios of times count."""
    return f"{os.getloadavg()[0]:.1f}"


def median_seconds(ways: Mapping[str, Callable[[], object]], rounds: int, least: float = 0.0) -> dict[str, float]:
    """Return the median seconds of each function in `ways`, in interleaved rounds after one warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begun, calls = time.perf_counter(), 0
            while calls == 0 or time.perf_counter() - begun < least:
                way()
                calls += 1
            if number:
                taken[name].append((time.perf_counter() - begun) / calls)
    return {name: statistics.median(times) for name, times in taken.items()}


def build_model(config: Any, row: int, device: str = "cpu") -> Any:
    """Build this package's model with random weights for rows of `row` tokens. On a GPU it is in bfloat16."""
    import qwen3vl_bridge  # noqa: F401  registers our model
    from qwen3vl_bridge.training.process_groups import initialize

    import torch
    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.seq_length, provider.bf16 = row, device == "cuda"
    provider.params_dtype = torch.bfloat16 if provider.bf16 else torch.float32
    provider.finalize()
    initialize(provider, 0)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=device == "cpu")
    return model.to(device).train()


def print_profile(name: str, step: Callable[[], object], folder: Path | None = None) -> None:
    """Profile a step, print the operations that take most time, and write a timeline to a folder."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiled:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    events = profiled.key_averages()
    print(name, events.table(sort_by=f"self_{device}_time_total", row_limit=20, max_name_column_width=80), sep="\n")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(folder / f"{name.replace(', ', '_').replace(' ', '_')}.json.gz"))
