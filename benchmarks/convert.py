"""How fast conversion is against `cp` of the same bytes, and how much memory it takes.

    python benchmarks/convert.py --text-layers 4 --vision-layers 6      # about 1.2 GB
    python benchmarks/convert.py                                        # a whole 2B, 4.3 GB

Random bfloat16 weights in the widths of Qwen3-VL-2B are written once; then, in interleaved rounds, `cp`, import,
export and verify. Every step starts with nothing left to be written to the disk, and with what it reads in the page
cache and nothing else. Prints medians, ratios to `cp` and the peak of anonymous memory above the idle process, and
appends a row to a CSV file.

What lives here: the measurement. What may not: code that conversion needs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.hf_writer import layout, write_index, write_shard
from qwen3vl_bridge.checkpoint.plan import make_table
from qwen3vl_bridge.checkpoint.tensors import TensorSpec
from qwen3vl_bridge.dimensions import dimensions_of
from qwen3vl_bridge.mappings import TABLE

import torch.distributed.checkpoint  # what an idle process of ours has loaded  # noqa: F401

_RESULTS = Path(__file__).parent / "results" / "convert.csv"
_MB = 1 << 20


def _config(text_layers: int, vision_layers: int) -> dict:
    text = dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=text_layers, vocab_size=151936)
    text |= dict(num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    vision = dict(depth=vision_layers, hidden_size=1024, intermediate_size=4096, num_heads=16, patch_size=16)
    vision |= dict(temporal_patch_size=2, spatial_merge_size=2, num_position_embeddings=2304)
    vision["deepstack_visual_indexes"] = [i for i in (5, 11, 17) if i < vision_layers]
    names = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "dtype": "bfloat16"}
    return names | {"text_config": text, "vision_config": vision, "tie_word_embeddings": True}


def _random_bytes(nbytes: int):
    while nbytes:
        block = os.urandom(min(nbytes, 1 << 22))
        nbytes -= len(block)
        yield memoryview(block)


def make_model(folder: Path, text_layers: int, vision_layers: int) -> int:
    """Write a model of random bytes; returns how many."""
    config = _config(text_layers, vision_layers)
    shapes = make_table(TABLE, dimensions_of(config)).hf
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shards = layout([TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()])
    for shard in shards:
        write_shard(folder, shard, (_random_bytes(spec.nbytes) for spec in shard.tensors))
    write_index(folder, shards)
    return sum(shard.nbytes for shard in shards)


def _anonymous() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def _settle(work: Path, source: Path) -> None:
    """Write everything to disk, then have the source in the page cache, and none of the other files."""
    os.sync()
    for path in sorted(work.rglob("*"), key=lambda path: path.is_relative_to(source)):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while path.is_relative_to(source) and file.read(1 << 22):
                    pass


def measure(step: Callable[[], object]) -> tuple[float, int]:
    """Seconds a step takes, and the peak of anonymous memory above what there was before."""
    before = peak = _anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return seconds, peak - before


def _copy(source: Path, target: Path, *, sync: bool) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    if sync:
        for path in target.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def run(work: Path, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Measure every step in each round."""
    hf, copy, megatron, exported = (work / name for name in ("hf", "copy", "megatron", "exported"))
    results: dict[str, list[tuple[float, int]]] = {}
    for _ in range(rounds):
        for sync in (False, True):
            suffix = "+fsync" if sync else ""
            steps: list[tuple[str, Path, Callable[[], object]]] = [
                ("cp", hf, lambda sync=sync: _copy(hf, copy, sync=sync)),
                ("import", hf, lambda sync=sync: import_checkpoint(hf, megatron, sync=sync)),
                ("export", megatron, lambda sync=sync: export_checkpoint(megatron, exported, sync=sync)),
            ]
            for name, source, step in steps:
                _settle(work, source)
                results.setdefault(name + suffix, []).append(measure(step))
                shutil.rmtree(copy, ignore_errors=True)

            if sync:
                _settle(work, work)
                results.setdefault("verify", []).append(measure(lambda: verify_checkpoint(hf, megatron)))
            for path in (megatron, exported):
                shutil.rmtree(path)
    return results


def _machine() -> str:
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} x {model}"


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text-layers", type=int, default=28)
    parser.add_argument("--vision-layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--csv", type=Path, default=_RESULTS, help="file to append to (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        nbytes = make_model(work / "hf", options.text_layers, options.vision_layers)
        results = run(work, options.rounds)
    seconds = {step: statistics.median(took for took, _ in runs) for step, runs in results.items()}
    row: dict[str, object] = {"date": datetime.date.today().isoformat(), "machine": _machine(), "bytes": nbytes}
    row["rounds"] = options.rounds
    for step, took in seconds.items():
        ratio = took / seconds["cp+fsync" if step.endswith("fsync") else "cp"]
        memory = max(peak for _, peak in results[step]) / _MB
        print(
            f"{step:14} {took:6.2f} s  {nbytes / took / 1e9:5.2f} GB/s  {ratio:5.2f} x cp  {memory:6.1f} MB anonymous"
        )
        row |= {f"{step} s": f"{took:.3f}", f"{step} / cp": f"{ratio:.3f}", f"{step} MB": f"{memory:.1f}"}
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    new = not options.csv.exists()
    with options.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
