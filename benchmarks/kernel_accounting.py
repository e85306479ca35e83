"""Count the GPU work of a forward and a backward pass of our model, Megatron-Bridge's and transformers'.

    python -m benchmarks.kernel_accounting
    python -m benchmarks.kernel_accounting --size 30B-A3B
    python -m benchmarks.kernel_accounting --size 9B    # Qwen3.5, which needs flash-linear-attention
    python -m benchmarks.kernel_accounting --detail     # with the operations of a layer of each tower

No GPU is needed: each model runs on the fake GPU, with a released model's widths, in bfloat16, on the same six samples
with six images, packed into one row or padded to six rows. Models of three depths are counted, and the difference of
two is the work of a layer. (In Qwen3.5's text model it is the work of four layers, one of them with full attention.)
The work of the complete model is computed from these. Figures named "/token" are per token without padding, and
"beside" is the work outside of layers, such as the loss. All experts get equally many tokens. Multi-token prediction is
off.

- launches: kernels, matrix products, copies and memsets in the fake GPU's log.
- elementwise bytes: bytes that kernels read and write, except matrix products, attention and the delta rule. Tensors of
  an operation count once (seen by a dispatch mode of torch); of a compiled kernel its arguments, twice if they are
  written in place; of other packages' Triton kernels and of Transformer Engine's functions arguments and results.
- GFLOP: FLOPs of matrix products in the log, without attention and the delta rule.
- least us: computed time on an H100: products at 989 TFLOP/s, then elementwise bytes at 3.35 TB/s.

Both Megatron models have Transformer Engine's layers if it is installed, without its attention (cuDNN's). Otherwise
they have megatron-core's local layers with torch's attention. transformers uses `sdpa`, for a packed row with a block
mask. Positions, offsets of images and the search for True elements of masks are not counted, because they depend on
values, which a fake GPU does not compute. This favors the other models. Their convolution of patches counts as one
product.

All models have flash-linear-attention's delta rule. Megatron-Bridge's Qwen3.5 needs Transformer Engine: megatron-core's
local norms cannot multiply by 1 + weight. With local layers it is counted with norms that multiply by the weight, which
are cheaper. transformers' convolution before the delta rule does not stop at the bounds of packed samples.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from qwen3vl_bridge.core.files import user_cache
from qwen3vl_bridge.simulation import fake_gpu

from benchmarks import measurement

BASE = 4, 3  # text and vision layers of the first of three depths
WAYS = ("ours", "Megatron-Bridge", "transformers")
PRODUCTS_PER_SECOND, BYTES_PER_SECOND = 989e12, 3.35e12  # of an H100: dense bfloat16 FLOP/s, and memory


class Size(NamedTuple):
    """Numbers of text and vision layers, and the `period` after which the kinds of text layers repeat."""

    text: int
    vision: int
    period: int = 1

    def depths(self) -> dict[str, tuple[int, int]]:
        """Return (text layers, vision layers) of each model that is counted, by the name of the model."""
        text, vision = BASE
        return {"base": BASE, "text": (text + self.period, vision), "vision": (text, vision + 1)}


SIZES = {
    "8B": Size(36, 27),
    "30B-A3B": Size(48, 27),
    "9B": Size(32, 27, period=4),
    "35B-A3B": Size(40, 27, period=4),
}


class Asked(NamedTuple):
    """GPU work of a pass, a layer or a token."""

    launches: float = 0
    elementwise: float = 0  # number of elementwise kernels
    nbytes: float = 0  # bytes that elementwise kernels read and write
    flops: float = 0  # FLOPs of matrix products

    def plus(self, other: Asked, times: float = 1) -> Asked:
        """Return this work plus `times` times the other work."""
        return Asked(*(a + times * b for a, b in zip(self, other, strict=True)))


def counted(way: str, size: str) -> dict[str, Any]:
    """Run `kernel_ledger` for an implementation (`way`) and a size on the fake GPU, and return its results."""
    built = fake_gpu.build(user_cache() / "fake_gpu")
    with tempfile.TemporaryDirectory() as folder:
        # More memory than an H100 has, because transformers' logits would not fit.
        variables = fake_gpu.environment(built, Path(folder) / "log", gib=1000) | {"HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "benchmarks.kernel_ledger", way, size]
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{way} could not be counted: exit status {done.returncode}, see above")
    return json.loads(lines[0].removeprefix("RESULT "))


def row(way: str, size: str, rows: str, counts: dict[str, Any], ours: Asked | None) -> tuple[dict[str, Any], Asked]:
    """Return a row of the results, and the work of the complete model.

    Ratios are relative to the work `ours`; if it is None, to the model's own work.
    """
    tokens, found = counts["tokens"], counts["found"]
    shape = SIZES[size]
    base, *deeper = (Asked(*found[f"{rows} {depth}"][0]) for depth in shape.depths())
    text, vision = layers = [one.plus(base, -1) for one in deeper]
    rest = base.plus(text, -BASE[0] / shape.period).plus(vision, -BASE[1])
    whole = rest.plus(text, shape.text / shape.period).plus(vision, shape.vision)
    ours = ours or whole
    seconds = whole.flops / PRODUCTS_PER_SECOND, whole.nbytes / BYTES_PER_SECOND
    made: dict[str, Any] = {
        "size": size,
        "layers": "torch" if way == "transformers" else counts["layers"],
        "tokens": tokens,
        "rows": rows,
        "way": way,
        "launches": round(whole.launches),
        "of ours": f"{whole.launches / ours.launches:.2f}",
        "elementwise kB/token": f"{whole.nbytes / tokens / 1e3:.0f}",
        "bytes of ours": f"{whole.nbytes / ours.nbytes:.2f}",
        "GFLOP/token": f"{whole.flops / tokens / 1e9:.1f}",
        "least us/token": f"{sum(seconds) / tokens * 1e6:.1f}",
        "products' share": f"{seconds[0] / sum(seconds):.2f}",
    }
    for tower, layer in zip(("text", "vision"), layers, strict=True):
        made[f"launches of a {tower} layer"] = round(layer.launches)
        made[f"kB/token of a {tower} layer"] = f"{layer.nbytes / tokens / 1e3:.0f}"
    return made | {
        "launches beside": round(rest.launches),
        "kB/token beside": f"{rest.nbytes / tokens / 1e3:.0f}",
    }, whole


def main() -> None:
    """Count all implementations, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "kernel_accounting.csv")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: all; ours is the measure")
    parser.add_argument("--size", choices=SIZES, default="8B")
    parser.add_argument("--detail", action="store_true", help="print the operations of a layer of each tower too")
    options = parser.parse_args()
    if SIZES[options.size].period > 1 and importlib.util.find_spec("fla") is None:
        parser.error(f"--size {options.size} has linear attention: install flash-linear-attention")
    counts = {way: counted(way, options.size) for way in dict.fromkeys(("ours", *options.ways))}
    results = []
    for rows in ("packed", "padded"):
        ours = None
        for way, found in counts.items():
            made, whole = row(way, options.size, rows, found, ours)
            ours = ours or whole
            results.append(made)
            print("  ".join(f"{name} {value}" for name, value in made.items()), flush=True)
            for depth in SIZES[options.size].depths() if options.detail else ():
                print_operations(found["found"], rows, depth, found["tokens"])
    measurement.append(options.csv, results)


def print_operations(found: dict[str, Any], rows: str, depth: str, tokens: int) -> None:
    """Print the operations of a layer: those that a model of depth `depth` runs in addition to the base model."""
    base, other = (found[f"{rows} {name}"][1] for name in ("base", depth))
    print(f"    {rows}, {depth}")
    lines = []
    for name, (launches, nbytes) in other.items():
        before = base.get(name, (0, 0)) if depth != "base" else (0, 0)
        lines.append((nbytes - before[1], launches - before[0], name))
    for nbytes, launches, name in sorted(lines, reverse=True):
        if launches:
            print(f"        {launches:5.0f} launches {nbytes / tokens / 1e3:8.1f} kB/token  {name}")


if __name__ == "__main__":
    main()
