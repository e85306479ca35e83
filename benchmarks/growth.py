"""How time and memory of a training step grow: with the row, its pictures, its segments, the experts.

    OMP_NUM_THREADS=1 python benchmarks/growth.py
    OMP_NUM_THREADS=1 python benchmarks/growth.py --only segments --csv /tmp/growth.csv

One core, float32, a small model. Each point is a process of its own, forked after imports: a model is built, one step
warms up, and of a second (forward, backward) are taken the processor's seconds and by how much memory rose at its peak.
The exponent printed for a series is the slope between its last two points: 1 is linear. It draws `growth.svg` beside
the CSV file.

Series:
- row: documents of 1,024 tokens, 256 of them a picture's.
- document: one document as long as the row: attention's pairs grow by the square.
- pictures: in a row of 16,384 tokens.
- segments: that a row of 8,192 tokens is cut into.
- experts: of a mixture, two of which each token visits.

What lives here: the measurement. What may not: code that training needs.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  (registers our model)
from qwen3vl_bridge.data.processing.collation import Collator, VisionSettings
from qwen3vl_bridge.data.processing.encoding import EncodedSample
from qwen3vl_bridge.models.qwen3_vl.presets import hf_config
from qwen3vl_bridge.training.process_groups import shutdown

import record
import torch
from step import build

_RESULTS = record.RESULTS / "growth.csv"
_IMAGE, _VIDEO, _START, _END, _PAD = 4001, 4002, 4003, 4004, 4005
_PICTURE = 16  # tokens on a side


def configuration(experts: int = 0) -> Any:
    """Three layers and a tower of three, or the same with experts."""
    config = hf_config("30B-A3B" if experts else "2B")
    text, vision = config.text_config, config.vision_config
    text.update(dict(hidden_size=256, intermediate_size=768, num_hidden_layers=3, vocab_size=4096, dtype="float32"))
    text.update(dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64))
    text.rope_parameters["mrope_section"] = [12, 10, 10]
    text.bos_token_id, text.eos_token_id, text.pad_token_id = _PAD, _PAD, _PAD
    if experts:
        text.update(dict(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=192))
    vision.update(dict(hidden_size=128, intermediate_size=512, depth=3, num_heads=4, out_hidden_size=256))
    vision.deepstack_visual_indexes = [0, 1, 2]
    config.image_token_id, config.video_token_id = _IMAGE, _VIDEO
    config.vision_start_token_id, config.vision_end_token_id = _START, _END
    return config


def sample(length: int, pictures: int) -> EncodedSample:
    """A document of so many tokens, its pictures first."""
    ids = pictures * [_START, *[_IMAGE] * _PICTURE**2, _END]
    tokens = torch.cat((torch.tensor(ids, dtype=torch.int64), torch.randint(0, 4000, (length - len(ids),))))
    grids = torch.tensor(pictures * [[1, 2 * _PICTURE, 2 * _PICTURE]]) if pictures else None
    pixels = torch.randn(pictures * 4 * _PICTURE**2, 1536) if pictures else None
    return EncodedSample(tokens, tokens.roll(-1), torch.ones(length), pixels, grids, "a sample")


# Series -> its points: number on the axis -> (experts, (tokens, pictures) of each document).
SERIES: dict[str, dict[int, tuple[int, list[tuple[int, int]]]]] = {
    "row": {n: (0, n // 1024 * [(1024, 1)]) for n in (1024, 2048, 4096, 8192, 16384, 32768)},
    "document": {n: (0, [(n, 1)]) for n in (1024, 2048, 4096, 8192, 16384)},
    "pictures": {n: (0, 16 * [(1024, n // 16)]) for n in (0, 16, 32, 48)},
    "segments": {n: (0, n * [(8192 // n, 0)]) for n in (8, 32, 128, 512)},
    "experts": {n: (n, 4 * [(1024, 1)]) for n in (8, 16, 32, 64, 128)},
}


def measure(experts: int, documents: list[tuple[int, int]]) -> tuple[float, float]:
    """Seconds of a processor for a step, and MiB by which it raised memory; in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    row = sum(length for length, _ in documents)
    model = build(configuration(experts), row, torch.float32, torch.device("cpu"))
    collator = Collator(VisionSettings(_IMAGE, _VIDEO, 2, 48**2), _PAD, row)
    batch = collator.packed([sample(*document) for document in documents])

    def step() -> None:
        inputs = batch.local()
        (model(inputs=inputs) * inputs.loss_mask).sum().backward()

    step()
    with _Peak() as peak:
        begun = time.process_time()
        step()
        taken = time.process_time() - begun
    shutdown()
    return taken - peak.taken, peak.rise / 2**20


class _Peak:
    """The most memory that the process had at once meanwhile, above what it began with, looked at every millisecond."""

    def __enter__(self) -> _Peak:
        self.rise, self.taken, self._over = 0, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        first = _resident()
        while not self._over.wait(0.001):
            self.rise = max(self.rise, _resident() - first)
        self.taken = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in a forked process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Each series that was measured, time and memory, both axes logarithmic, beside a line of slope one."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    measured = list(dict.fromkeys(line["series"] for line in lines))
    figure, axes = pyplot.subplots(2, len(measured), figsize=(3 * len(measured), 5.5), squeeze=False)
    for column, series in zip(axes.T, measured, strict=True):
        own = [line for line in lines if line["series"] == series and line["number"]]
        numbers = [line["number"] for line in own]
        for axis, key in zip(column, ("CPU seconds", "MiB"), strict=True):
            values = [float(line[key]) for line in own]
            axis.plot(numbers, values, "o-", color="#1f77b4")
            linear = [values[-1] * number / numbers[-1] for number in numbers]
            axis.plot(numbers, linear, "--", color="#999999", linewidth=1)
            axis.set(xscale="log", yscale="log", xlabel=series, ylabel=key)
            axis.set_xticks(numbers, [f"{n:,}" for n in numbers], rotation=45, fontsize=7)
            axis.minorticks_off()
    figure.suptitle("A training step; dashed: linear in the number on the axis")
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    """Measure, print, append, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=SERIES, help="one series (default: all)")
    parser.add_argument("--csv", type=Path, default=_RESULTS, help="file to append to (default: %(default)s)")
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for series, points in SERIES.items():
        if options.only not in (None, series):
            continue
        before = None
        for number, (experts, documents) in points.items():
            seconds, rise = in_process(measure, experts, documents)
            slopes = ""
            if before and before[0]:
                span = math.log(number / before[0])
                slopes = (
                    f"exponents {math.log(seconds / before[1]) / span:.2f}, {math.log(rise / before[2]) / span:.2f}"
                )
            print(f"{series:10} {number:6}  {seconds:8.2f} s CPU  {rise:8.0f} MiB  {slopes}", flush=True)
            before = number, seconds, rise
            lines.append({"series": series, "number": number, "CPU seconds": f"{seconds:.3f}", "MiB": f"{rise:.0f}"})
    record.append(options.csv, lines)
    draw(lines, options.csv.with_suffix(".svg"))


if __name__ == "__main__":
    main()
