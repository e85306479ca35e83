"""Compare time and memory of conversions with `cp` of the same bytes.

    python -m benchmarks.convert                                          # the full 2B, 4.3 GB
    python -m benchmarks.convert --size 2B --text-layers 4 --vision-layers 6 --rounds 3
    python -m benchmarks.convert --size 30B-A3B --text-layers 8 --rounds 1
    python -m benchmarks.convert --family qwen3_5 --size 35B-A3B --text-layers 1 --rounds 1
    python -m benchmarks.convert --family qwen4_exp --size Flash-Next --text-layers 2 --ngram-rows 100000 --rounds 1
    python -m benchmarks.convert --size 8B --text-layers 8 --fp8                 # `cp` copies the imported checkpoint

Random bfloat16 weights in the shapes of a released size are written once, experts transposed as released. Then
interleaved rounds run `cp`, import to both formats, export and verify. Before each step all writes are flushed to disk,
and only the source of the step is in the page cache. Prints medians, ratios to `cp` and the peak of anonymous memory
above the idle process, and appends rows with the load of the machine to a CSV file. To measure memory, each step of the
first round runs in a new process.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.conversion_plan import Plan, Task, tensors_of
from qwen3vl_bridge.checkpoint.formats.huggingface import plan_file, split_into_shards, write_index
from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace
from qwen3vl_bridge.checkpoint.formats.tensors import QuantizedSlice, Slice, SliceList, TensorSpec, ZeroSlice
from qwen3vl_bridge.checkpoint.fp8_export import QUANTIZATION, Fp8Export
from qwen3vl_bridge.registry import family, family_of
from qwen3vl_bridge.weights.rows import expand

import numpy as np

from benchmarks import measurement

_MB = 1 << 20


def _config(
    name: str, size: str, text_layers: int | None, vision_layers: int | None, ngram_rows: int | None = None
) -> dict:
    config = family(name).presets.config_dict(size)
    text, vision = config["text_config"], config["vision_config"]
    if text_layers is not None:
        text["num_hidden_layers"] = text_layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:text_layers]
        if "ple_layer_ids" in text:  # counted from 1
            text["ple_layer_ids"] = [layer for layer in text["ple_layer_ids"] if layer <= text_layers]
    if ngram_rows is not None:
        text["ngram_vocab_size_base"] = ngram_rows
    if vision_layers is not None:
        vision["depth"] = vision_layers
        if "deepstack_visual_indexes" in vision:
            vision["deepstack_visual_indexes"] = [i for i in vision["deepstack_visual_indexes"] if i < vision_layers]
    return config


def _tasks(config: dict) -> list[Task]:
    own = family_of(config)
    dimensions = own.dimensions(config)
    shapes = tensors_of(expand(own.rows(), dimensions), HuggingFace(dimensions))
    specs = (TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items())
    return [Task(spec, SliceList([ZeroSlice(spec.numel)])) for spec in specs]


def make_model(folder: Path, config: dict, *, in_fp8: bool = False) -> int:
    """Write a model with random weights, and return its size in bfloat16 in bytes. FP8 weights have scales of 2^-10."""
    folder.mkdir()
    tasks = _tasks(config)
    nbytes = sum(task.target.nbytes for task in tasks)
    if in_fp8:
        only_experts = family_of(config).fp8_only_experts
        export = Fp8Export.for_model(config, folder, [task.target.name for task in tasks], only_experts=only_experts)
        tasks, config = export.quantize(Plan(tuple(tasks))).tasks, config | {QUANTIZATION: export.quantization}
    (folder / "config.json").write_text(json.dumps(config))
    parts = split_into_shards(tasks)
    files = [plan_file(name, part) for name, part in parts.items()]
    for file in files:
        with (folder / file.name).open("wb") as out:
            for content in file.contents:
                if isinstance(content, bytes):
                    out.write(content)
                    continue
                for start in range(0, len(content), 1 << 22):
                    out.write(_random(min(1 << 22, len(content) - start), next(iter(content.slices))))
    write_index(folder, parts)
    return nbytes


def _random(nbytes: int, of: Slice) -> bytes:
    """Return `nbytes` random bytes for a tensor in bfloat16 or FP8, without NaN and infinity."""
    if not isinstance(of, QuantizedSlice):
        return (np.frombuffer(os.urandom(nbytes), np.uint16) & 0xBFFF).tobytes()  # magnitudes below 2
    if of.is_scales:
        return b"\x80\x3a" * (nbytes // 2)
    return (np.frombuffer(os.urandom(nbytes), np.uint8) & 0xF7).tobytes()


def _anonymous() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def _settle(work: Path, source: Path) -> None:
    """Flush all writes to disk, and leave only the files in `source` in the page cache."""
    os.sync()
    for path in sorted(work.rglob("*"), key=lambda path: path.is_relative_to(source)):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while path.is_relative_to(source) and file.read(1 << 22):
                    pass


def measure(step: Callable[[], object]) -> tuple[float, int]:
    """Run a step. Return its seconds, and by how many bytes anonymous memory rose at its peak."""
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


def measure_apart(step: Callable[[], object]) -> tuple[float, int]:
    """Measure a step in a new process. A process that has run a step before reuses memory that it has kept."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: sender.send(measure(step)))
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"a step ended with {child.exitcode}")
    return receiver.recv()


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _without_sync() -> Iterator[None]:
    """Disable `os.fsync` and `os.fdatasync` inside the `with` block."""
    with mock.patch.object(os, "fsync"), mock.patch.object(os, "fdatasync"):
        yield


def _steps(work: Path, *, sync: bool) -> Iterator[tuple[str, Path, Callable[[], object]]]:
    hf, copy, megatron, torch_dist, exported = (work / n for n in ("hf", "copy", "megatron", "torch_dist", "exported"))
    wide = work / "bf16"  # of a model in FP8
    quantize = "fp8" if wide.exists() else None
    copied = wide if quantize else hf
    yield "cp", copied, lambda: _copy(copied, copy)
    yield "import", hf, lambda: import_checkpoint(hf, megatron)
    yield "export", megatron, lambda: export_checkpoint(megatron, exported, quantize=quantize)
    if sync:
        yield "verify", work, lambda: verify_checkpoint(hf, megatron)
    else:
        yield "import torch_dist", hf, lambda: import_checkpoint(hf, torch_dist, ckpt_format="torch_dist")


def run(work: Path, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Run every step in each round; return (seconds, bytes) of all rounds, by step."""
    results: dict[str, list[tuple[float, int]]] = {}
    for number in range(rounds):
        how = measure if number else measure_apart
        for sync in (False, True):
            for name, source, step in _steps(work, sync=sync):
                _settle(work, source)
                name += "+fsync" if sync and name != "verify" else ""
                with contextlib.nullcontext() if sync else _without_sync():
                    results.setdefault(name, []).append(how(step))
                for left in ("copy", "torch_dist", "exported"):
                    shutil.rmtree(work / left, ignore_errors=True)
            shutil.rmtree(work / "megatron")
    return results


def main() -> None:
    """Measure all steps, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "convert.csv", rounds=5)
    families = ("qwen3_vl", "qwen3_5", "qwen4_exp")
    parser.add_argument("--family", choices=families, default="qwen3_vl", help="default: %(default)s")
    parser.add_argument("--size", default="2B", help="one that the family was released in (default: %(default)s)")
    parser.add_argument("--text-layers", type=int, help="fewer than the size has")
    parser.add_argument("--vision-layers", type=int, help="fewer than the size has")
    parser.add_argument("--ngram-rows", type=int, help="rows in the n-gram table of each hash head, of qwen4_exp")
    parser.add_argument("--fp8", action="store_true", help="a model in FP8, exported to FP8")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    if options.ngram_rows is not None and options.family != "qwen4_exp":
        parser.error(f"--ngram-rows is given, but {options.family} has no n-gram table; remove it")
    config = _config(options.family, options.size, options.text_layers, options.vision_layers, options.ngram_rows)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        nbytes = make_model(work / "hf", config, in_fp8=options.fp8)
        if options.fp8:
            import_checkpoint(work / "hf", work / "megatron")
            export_checkpoint(work / "megatron", work / "bf16")
            shutil.rmtree(work / "megatron")
        results = run(work, options.rounds)
    seconds = {step: statistics.median(took for took, _ in runs) for step, runs in results.items()}
    rows = []
    for step, took in seconds.items():
        ratio = took / seconds["cp+fsync" if step.endswith("fsync") else "cp"]
        memory = max(peak for _, peak in results[step]) / _MB
        print(
            f"{step:20} {took:6.2f} s  {nbytes / took / 1e9:5.2f} GB/s  {ratio:5.2f} x cp  {memory:6.1f} MB anonymous"
        )
        layers = config["text_config"]["num_hidden_layers"], config["vision_config"]["depth"]
        rows.append(
            {
                "family": options.family,
                "size": options.size + ("-FP8" if options.fp8 else ""),
                "text layers": layers[0],
                "vision layers": layers[1],
                "bytes": nbytes,
                "rounds": len(results[step]),
                "step": step,
                "seconds": f"{took:.3f}",
                "of cp": f"{ratio:.3f}",
                "MB": f"{memory:.1f}",
                "load": measurement.load(),
            }
        )
    measurement.append(options.csv, rows)


if __name__ == "__main__":
    main()
