"""Measure how time and memory of a training step grow with the row, images, segments and experts.

    OMP_NUM_THREADS=1 python -m benchmarks.growth
    OMP_NUM_THREADS=1 python -m benchmarks.growth --only segments --csv /tmp/growth.csv

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 python -m benchmarks.growth

One core, float32, a small model. Each point is a forked process that takes three steps (forward and backward). The
first step warms up. The second counts the peak bytes of the step's tensors, with gradients, without weights and buffers
inside kernels. The third measures user and system seconds. System time is high because glibc returns free blocks above
32 MiB to the operating system, which clears each page of a new block. With the third command glibc keeps them.

The exponents that are printed are slopes of user time and bytes between two points: 1 is linear.
`scripts/draw_benchmarks.py` draws the results.

Series:
- row: documents of 1,024 tokens, 256 of them from an image.
- document: one document as long as the row, so attention grows with the square.
- images: number of images in a row of 16,384 tokens.
- segments: number of segments in a row of 8,192 tokens.
- experts: number of experts, with two per token.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import weakref
from collections.abc import Callable
from typing import Any

import qwen3vl_bridge  # noqa: F401  (registers our model)
from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.models.qwen3_vl.presets import hf_config
from qwen3vl_bridge.training.process_groups import shutdown

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks import measurement

_IMAGE, _VIDEO, _START, _END, _PAD = 4001, 4002, 4003, 4004, 4005
_PICTURE = 16  # tokens on a side


def configuration(experts: int = 0) -> Any:
    """Return a configuration with three text and three vision layers, dense or with experts."""
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
    """Return a document of `length` tokens that begins with `pictures` images."""
    ids = pictures * [_START, *[_IMAGE] * _PICTURE**2, _END]
    tokens = torch.cat((torch.tensor(ids, dtype=torch.int64), torch.randint(0, 4000, (length - len(ids),))))
    grids = torch.tensor(pictures * [[1, 2 * _PICTURE, 2 * _PICTURE]]) if pictures else None
    pixels = torch.randn(pictures * 4 * _PICTURE**2, 1536) if pictures else None
    return EncodedSample(tokens, tokens.roll(-1), torch.ones(length), pixels, grids, "a sample")


# Series -> its points: number on the axis -> (experts, (tokens, images) of each document).
SERIES: dict[str, dict[int, tuple[int, list[tuple[int, int]]]]] = {
    "row": {n: (0, n // 1024 * [(1024, 1)]) for n in (1024, 2048, 4096, 8192, 16384, 32768)},
    "document": {n: (0, [(n, 1)]) for n in (1024, 2048, 4096, 8192, 16384)},
    "pictures": {n: (0, 16 * [(1024, n // 16)]) for n in (0, 16, 32, 48)},
    "segments": {n: (0, n * [(8192 // n, 0)]) for n in (8, 32, 128, 512)},
    "experts": {n: (n, 4 * [(1024, 1)]) for n in (8, 16, 32, 64, 128)},
}


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live tensors that operations create inside the `with` block.

    Attributes:
        peak: the largest number of bytes in memory at one time.

    Args:
        before: tensors that are not counted.
    """

    def __init__(self, before: Any) -> None:
        super().__init__()
        self._known = {one.untyped_storage()._cdata for one in tree_iter(before) if isinstance(one, torch.Tensor)}
        self._held, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_iter(made):
            if isinstance(one, torch.Tensor):
                self._see(one.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self._held += storage.nbytes()
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, known: int, held: int) -> None:
        self._known.discard(known)
        self._held -= held


def measure(experts: int, documents: list[tuple[int, int]]) -> tuple[float, float, float]:
    """Return user seconds, system seconds and peak MiB of tensors in a step. Call this in a new process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    row = sum(length for length, _ in documents)
    model = measurement.build_model(configuration(experts), row)
    collator = Collator(VisionSettings(_IMAGE, _VIDEO, 2, 48**2), _PAD, row)
    batch = collator.collate_packed([sample(*document) for document in documents])

    def step() -> None:
        inputs = batch.local()
        model.zero_grad()
        (model(inputs=inputs) * inputs.loss_mask).sum().backward()

    step()
    with LiveBytes([list(model.parameters()), list(model.buffers())]) as live:
        step()
    begun = resource.getrusage(resource.RUSAGE_SELF)
    step()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    shutdown()
    return ended.ru_utime - begun.ru_utime, ended.ru_stime - begun.ru_stime, live.peak / 2**20


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a forked process and return its result."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    """Measure all series, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "growth.csv")
    parser.add_argument("--only", choices=SERIES, help="one series (default: all)")
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for series, points in SERIES.items():
        if options.only not in (None, series):
            continue
        before = None
        for number, (experts, documents) in points.items():
            user, system, held = in_process(measure, experts, documents)
            slopes = ""
            if before and before[0]:
                span = math.log(number / before[0])
                slopes = f"exponents {math.log(user / before[1]) / span:.2f}, {math.log(held / before[2]) / span:.2f}"
            print(
                f"{series:10} {number:6}  {user:8.2f} s user {system:8.2f} s system {held:8.1f} MiB  {slopes}",
                flush=True,
            )
            before = number, user, held
            lines.append(
                {
                    "series": series,
                    "number": number,
                    "CPU seconds": f"{user + system:.3f}",
                    "system seconds": f"{system:.3f}",
                    "MiB": f"{held:.1f}",
                    "mmap threshold": os.environ.get("MALLOC_MMAP_THRESHOLD_", ""),
                    "load": measurement.load(),
                }
            )
    measurement.append(options.csv, lines)


if __name__ == "__main__":
    main()
