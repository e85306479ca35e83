"""Import and export of a model of the 2B's size beside `cp` of the same bytes, on this machine's disk.

What lives here: the order of the commands. What may not: medians over rounds, which `benchmarks/convert.py` takes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint, verify_checkpoint

from . import models
from .random_data import model_config, write_model_folder
from .results import Finding, Place


def compare(place: Place) -> list[Finding]:
    """cp, import to both formats, export, and whether what comes back is what went in."""
    folder = place.work / "conversion"
    shutil.rmtree(folder, ignore_errors=True)
    hf, back = write_model_folder(place, folder / "hf"), folder / "back"
    models.theirs(place, model_config(place), "sdpa").cpu().save_pretrained(hf)
    size = sum(file.stat().st_size for file in hf.iterdir())
    seconds = {"cp": _timed(lambda: subprocess.run(["cp", "-r", hf, folder / "copy"], check=True))}
    for name in ("fsdp_dtensor", "torch_dist"):
        seconds[f"import to {name}"] = _timed(
            lambda name=name: import_checkpoint(hf, folder / name, ckpt_format=name, progress=False)
        )
    seconds["export"] = _timed(lambda: export_checkpoint(folder / "torch_dist", back, hf_model=hf, progress=False))
    found = [Finding("model", f"{size / 1e9:.2f} GB")]
    found += [
        Finding(name, f"{took:.1f} s, {size / took / 1e9:.2f} GB/s, {took / seconds['cp']:.2f} times cp")
        for name, took in seconds.items()
    ]
    for name in ("fsdp_dtensor", "torch_dist"):
        same = verify_checkpoint(back, folder / name).same
        found.append(Finding(f"{name} is what was exported", str(same), "every tensor", same))
    shutil.rmtree(folder)
    return found


def _timed(work: Callable[[], object]) -> float:
    """Seconds until it is on the disk; what others had left to be written is there before."""
    os.sync()
    begun = time.perf_counter()
    work()
    os.sync()
    return time.perf_counter() - begun
