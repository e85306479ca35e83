"""Which share of a training step the host's work on its batch takes.

    OMP_NUM_THREADS=1 python benchmarks/step.py
    OMP_NUM_THREADS=1 python benchmarks/step.py --model 8B --layers 36 --vision-layers 27    # on a GPU, whole

A packed row of samples with pictures (those of `host.py`) is collated, a rank's share of it is selected and moved, and
the model's forward and backward pass runs, on CUDA if there is one and on one core of the CPU otherwise. The model has
the released model's widths and as many layers as asked for. "whole" is the share of a step of the whole model, whose
time is taken to be longer by as much as it computes more (`qwen3vl_bridge/models/flops.py`).

What lives here: the measurement. What may not: code that training needs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  (registers our model)
from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.models.flops import tower_costs
from qwen3vl_bridge.models.qwen3_vl.presets import hf_config
from qwen3vl_bridge.training.process_groups import initialize, shutdown

import host
import record
import torch
from megatron.bridge import AutoBridge

_RESULTS = record.RESULTS / "step.csv"


def shortened(name: str, layers: int, vision_layers: int) -> Any:
    """A released model's configuration with fewer layers."""
    config = hf_config(name)
    taps = len(config.vision_config.deepstack_visual_indexes)
    config.text_config.num_hidden_layers, config.vision_config.depth = layers, vision_layers
    config.vision_config.deepstack_visual_indexes = [
        number * vision_layers // (taps + 1) for number in range(1, taps + 1)
    ]
    return config


def build(config: Any, row: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Our model with random weights."""
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.seq_length, provider.params_dtype = row, dtype
    provider.bf16 = dtype == torch.bfloat16
    provider.finalize()
    initialize(provider, 0)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=device.type == "cpu")
    return model.to(device)


def cost_of(config: Any, samples: list[EncodedSample]) -> float:
    """Floating-point operations of a forward pass."""
    costs, total = tower_costs(config.to_dict()), 0.0
    for sample in samples:
        grids = sample.image_grid_thw
        frames = [] if grids is None else grids.prod(-1).tolist()
        total += costs.of(tokens=len(sample), patches=sum(frames), patch_pairs=sum(n**2 for n in frames))
    return total


def one_step(model: torch.nn.Module, samples: list[EncodedSample], collator: Any, device: torch.device) -> list[float]:
    """Seconds of collating; of selecting and moving; of forward and backward."""
    times = [time.perf_counter()]
    batch: PackedBatch = collator.packed(samples)
    times.append(time.perf_counter())
    inputs = batch.local()
    inputs = (inputs.pin_memory() if device.type == "cuda" else inputs).to(device, non_blocking=True)
    times.append(time.perf_counter())
    model.zero_grad(set_to_none=True)
    (model(inputs=inputs) * inputs.loss_mask).sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="2B", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=3, help="of the language model (default: %(default)s)")
    parser.add_argument("--vision-layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--row", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="after one that does not count (default: %(default)s)")
    parser.add_argument("--csv", type=Path, default=_RESULTS, help="file to append to (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = shortened(args.model, args.layers, args.vision_layers)
    model = build(config, args.row, dtype, device)
    fitting = [sample for sample in host.make_samples(256) if len(sample[0]) + 8 < args.row]
    samples = max(host.encoded_rows(fitting[:48], args.row), key=lambda row: sum(map(len, row)))
    collator = host.collator_of(args.row, dtype)
    rounds = [one_step(model, samples, collator, device) for _ in range(args.rounds + 1)][1:]
    collate, move, compute = (statistics.median(column) for column in zip(*rounds, strict=True))
    more = cost_of(hf_config(args.model), samples) / cost_of(config, samples)
    line = {
        "model": args.model,
        "layers": f"{args.layers}+{args.vision_layers}",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "one core",
        "tokens": sum(map(len, samples)),
        "patches": sum(len(sample.pixel_values) for sample in samples if sample.pixel_values is not None),
        "collate ms": f"{collate * 1e3:.1f}",
        "select and move ms": f"{move * 1e3:.1f}",
        "forward and backward ms": f"{compute * 1e3:.1f}",
        "share": f"{(collate + move) / (collate + move + compute):.5f}",
        "whole": f"{(collate + move) / (collate + move + compute * more):.5f}",
    }
    for name, value in line.items():
        print(f"{name:25}{value}")
    record.append(args.csv, [line])
    shutdown()


if __name__ == "__main__":
    main()
