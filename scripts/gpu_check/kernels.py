"""What a training step's time on the device goes to: a table of kernels, and a timeline.

What lives here: torch's profiler around steps of ours. What may not: comparing (`speed.py`).
"""

from __future__ import annotations

import gzip
import shutil

import qwen3vl_bridge  # noqa: F401  before Megatron

from torch.profiler import ProfilerActivity, profile

from . import models
from .random_data import make_row, model_config
from .results import Finding, Place
from .speed import wait

TABLE, TRACE = "kernels.txt", "trace.json.gz"
_MOST = 12 << 20  # bytes of a timeline that are kept


def look(place: Place) -> list[Finding]:
    """Two packed steps; the table and the timeline lie beside the results."""
    config = model_config(place)
    samples = make_row(place, config)
    model = models.ours(place, config, sum(len(one.ids) for one in samples))
    step = models.our_step(model, samples, config, packed=True)
    for _ in range(2):
        step()
    wait(place)
    on_gpu = place.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled:
        for _ in range(2):
            step()
        wait(place)
    events = profiled.key_averages()
    (place.out / TABLE).write_text(
        events.table(sort_by=f"self_{place.device}_time_total", row_limit=40, max_name_column_width=80)
    )
    whole, packed = place.work / "trace.json", place.out / TRACE
    profiled.export_chrome_trace(str(whole))
    with whole.open("rb") as source, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source, target)
    found = [Finding("table of kernels", TABLE), Finding("timeline", f"{TRACE}, {packed.stat().st_size / 1e6:.1f} MB")]
    if packed.stat().st_size > _MOST:
        packed.unlink()
        found[-1] = Finding("timeline", f"above {_MOST >> 20} MiB, left out")
    timed = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    total = sum(getattr(one, timed) for one in events) or 1.0
    most = sorted(events, key=lambda one: getattr(one, timed), reverse=True)[:5]
    return found + [Finding(f"{one.key[:80]}, share of the time", f"{getattr(one, timed) / total:.3f}") for one in most]
