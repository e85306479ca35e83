"""Measure a training step of our model and transformers' on a GPU: tokens per second, MFU, memory, synchronizations.

    python -m benchmarks.gpu                                                  # the 8B's widths, few layers
    python -m benchmarks.gpu --size 2B --text-layers 28 --vision-layers 24    # a complete model
    python -m benchmarks.gpu --profile out/gpu                                # with kernels and timelines
    python -m benchmarks.gpu --tiny --csv /tmp/gpu.csv                        # a simulation, also on a CPU

Random weights in bfloat16, six samples of 8,092 tokens in total with six images, packed into one row or padded to six.

- "step": a full step of Megatron-Bridge's loop with the recipe of 2B: distributed optimizer, guard, norms.
- other rows: only forward and backward pass. transformers has padded rows, with each installed attention.

FLOPs for MFU are from `qwen3vl_bridge/config/flops.py`, which does not count recomputation. "GiB" is the peak of
torch's allocator, "planned GiB" the planner's estimate. "waits" are the host-device synchronizations of a step that
torch detects, without those of megatron-core and Megatron-Bridge, and in total. "attention" names the kernels. An
implementation that runs out of memory has a row without figures.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.config.flops import Trained, tower_costs
from qwen3vl_bridge.config.size_presets import as_transformers
from qwen3vl_bridge.planning.from_config import estimate_run
from qwen3vl_bridge.registry import preset
from qwen3vl_bridge.testing.tiny_checkpoint import make_config
from qwen3vl_bridge.testing.tiny_processor import make_processor
from qwen3vl_bridge.training.callbacks import build_callbacks
from qwen3vl_bridge.training.config import GuardConfig
from qwen3vl_bridge.training.metrics import peak_flops
from qwen3vl_bridge.training.process_groups import shutdown
from qwen3vl_bridge.training.step import to_device
from qwen3vl_bridge.upstream.library_logs import quiet

import torch
from qwen3vl_recipes.paths import set_paths
from qwen3vl_recipes.qwen3_vl import qwen3_vl_2b_sft_config
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForImageTextToText

from benchmarks import measurement
from tests.helpers.batches import Sample, make_batch
from tests.helpers.ranks import forget_models
from tests.helpers.steps import followed, set_up, step_with_callbacks
from tests.helpers.sync_warnings import Syncs, count_syncs, own_syncs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM = 2  # steps that compile kernels and allocate
GIB = 2**30
FIGURES = ("seconds", "tokens/s", "TFLOP/s", "MFU", "GiB", "planned GiB", "waits", "all waits", "attention")
# Part of the name of a profiled operation -> attention kernel that it calls.
ATTENTIONS = {
    "_flash_attention_forward": "flash",
    "_efficient_attention_forward": "memory-efficient",
    "_cudnn_attention": "cuDNN",
    "attention_math": "math",
    "attention_for_cpu": "CPU",
    "FusedAttn": "Transformer Engine's by cuDNN",
    "FlashAttn": "flash-attn",
}
# For each sample: number of text tokens, and (rows, columns) of each image in vision tokens.
ROW = (
    (1400, ((24, 32), (16, 20))),
    (1100, ((20, 28),)),
    (900, ((28, 28),)),
    (500, ((18, 24),)),
    (300, ((16, 16),)),
    (760, ()),
)
TINY_ROW = ((40, ((3, 4), (2, 2))), (24, ((3, 3),)), (12, ()))

Step = Callable[[], Any]


def configuration(size: str, text_layers: int, vision_layers: int, *, tiny: bool) -> Any:
    """Return a released model's configuration with fewer layers and the tiny processor's token ids."""
    small = make_config(make_processor(512).tokenizer)
    small.architectures = ["Qwen3VLForConditionalGeneration"]
    if tiny:
        return small
    whole = preset(size)
    text, vision = whole["text_config"], whole["vision_config"]
    text["num_hidden_layers"], vision["depth"] = text_layers, vision_layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:text_layers]
    if taps := len(vision.get("deepstack_visual_indexes", ())):
        vision["deepstack_visual_indexes"] = [number * vision_layers // (taps + 1) for number in range(1, taps + 1)]
    config = as_transformers(whole)
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, getattr(small, name))
    return config


def make_samples(config: Any, *, tiny: bool) -> list[Sample]:
    """Return samples of random text and images."""
    random, samples = torch.Generator().manual_seed(0), []
    for text, pictures in TINY_ROW if tiny else ROW:
        ids = torch.randint(0, config.image_token_id - 16, (text,), generator=random).tolist()
        for rows, columns in reversed(pictures):
            placeholders = [config.image_token_id] * (rows * columns)
            ids[8:8] = [config.vision_start_token_id, *placeholders, config.vision_end_token_id]
        pixels = {}
        if pictures:
            grids = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in pictures])
            pixels["pixel_values"] = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 16 * 16, generator=random)
            pixels["image_grid_thw"] = grids
        samples.append(Sample(torch.tensor(ids), torch.ones(len(ids)), pixels))
    return samples


def operations_of(config: Any, samples: list[Sample]) -> float:
    """Return the FLOPs of a forward and a backward pass."""
    costs, total = tower_costs(config.to_dict(), Trained()), 0.0
    for sample in samples:
        frames = [math.prod(grid) for grid in sample.pixels.get("image_grid_thw", torch.empty(0)).tolist()]
        total += costs.count_flops(tokens=len(sample.ids), patches=sum(frames), patch_pairs=sum(n**2 for n in frames))
    return total


@contextmanager
def whole_step(config: Any, samples: list[Sample], rounds: int) -> Iterator[tuple[Step, float]]:
    """Yield a function that takes a step of Megatron-Bridge's loop, and the planner's estimate in GiB."""
    tokens = -(-sum(len(sample.ids) + 4 for sample in samples) // 8) * 8
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        make_processor(512).save_pretrained(folder)
        cfg = set_paths(qwen3_vl_2b_sft_config(), hf_path=folder, data_path="unused")
        cfg.model.seq_length = cfg.dataset.seq_length = tokens
        cfg.train.train_iters, cfg.train.global_batch_size = 10 * (WARM + rounds), 1
        cfg.checkpoint.save = cfg.checkpoint.load = cfg.checkpoint.save_interval = cfg.logger.tensorboard_dir = None
        cfg.scheduler.lr_warmup_iters, cfg.validation.eval_iters, cfg.logger.log_interval = 1, 0, 10**6
        planned = estimate_run(cfg, 1).peak.total / GIB
        run = set_up(cfg, data=False)
    run.cfg.guard = GuardConfig(on_nan="skip")
    vars(run.optimizer).pop("get_grad_norm", None)  # `set_up` has wrapped it, and the callbacks wrap it again
    run.stream = itertools.repeat(make_batch(samples, config, packed=True))
    with followed(run, build_callbacks(run.cfg)):
        yield lambda: step_with_callbacks(run), planned


@contextmanager
def of_ours(config: Any, samples: list[Sample], *, packed: bool) -> Iterator[tuple[Step, float]]:
    """Yield a function that copies a batch to the GPU and runs this package's model forward and backward.

    The second value is 0.0, because there is no estimate of memory.
    """
    model = measurement.build_model(config, sum(len(sample.ids) for sample in samples), DEVICE)
    local = make_batch(samples, config, packed=packed).local()

    def loss() -> torch.Tensor:
        inputs = to_device(local, model)
        return (model(inputs=inputs) * inputs.loss_mask).sum() / inputs.loss_mask.sum()

    yield functools.partial(_backward, model, loss), 0.0


@contextmanager
def of_transformers(config: Any, samples: list[Sample], *, attention: str) -> Iterator[tuple[Step, float]]:
    """Yield a function that runs transformers' model forward and backward on right-padded rows; see `of_ours`."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    with torch.device(DEVICE):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation=attention).train()
    ids = pad_sequence([sample.ids for sample in samples], batch_first=True)
    mask = pad_sequence([torch.ones_like(sample.ids) for sample in samples], batch_first=True)
    with_pictures = [sample.pixels for sample in samples if sample.pixels]
    arguments = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "pixel_values": torch.cat([pixels["pixel_values"] for pixels in with_pictures]).to(dtype),
        "image_grid_thw": torch.cat([pixels["image_grid_thw"] for pixels in with_pictures]),
    }
    yield (
        functools.partial(
            _backward, model, lambda: model(**{name: x.to(DEVICE) for name, x in arguments.items()}).loss
        ),
        0.0,
    )


def _backward(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    model.zero_grad(set_to_none=True)


def measure(step: Step, rounds: int) -> tuple[float, float, Syncs]:
    """Return median seconds, peak GiB, and the synchronizations of one more step."""

    def timed() -> float:
        begun = time.perf_counter()
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    for _ in range(WARM):
        timed()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timed() for _ in range(rounds))
    peak = torch.cuda.max_memory_allocated() / GIB if DEVICE == "cuda" else 0.0
    waits: Syncs = Counter()
    with count_syncs(waits):
        step()
    return seconds, peak, waits


def attention_of(step: Step) -> str:
    """Return the names of the attention kernels in a step, as text."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    names = [event.key for event in profiled.key_averages()]
    return " and ".join(kernel for part, kernel in ATTENTIONS.items() if any(part in name for name in names))


def main() -> None:
    """Measure all implementations, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "gpu.csv", rounds=7)
    parser.add_argument("--size", default="8B", help="default: %(default)s")
    parser.add_argument("--text-layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--vision-layers", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="only those whose names begin so, such as ours")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="print the kernels too, keep timelines there")
    parser.add_argument("--tiny", action="store_true", help="a model and a row for a simulation")
    options = parser.parse_args()
    quiet()
    config = configuration(options.size, options.text_layers, options.vision_layers, tiny=options.tiny)
    samples = make_samples(config, tiny=options.tiny)
    tokens, operations = sum(len(sample.ids) for sample in samples), operations_of(config, samples)
    attentions = ["sdpa", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]
    ways: dict[str, Callable[..., Any]] = {
        "ours, packed": functools.partial(of_ours, packed=True),
        "ours, padded": functools.partial(of_ours, packed=False),
        **{f"transformers, {name}": functools.partial(of_transformers, attention=name) for name in attentions},
        "step, packed": functools.partial(whole_step, rounds=options.rounds),
    }
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    peak = peak_flops(device)
    layers = f"{config.text_config.num_hidden_layers}+{config.vision_config.depth}"
    model = dict(device=device, size="tiny" if options.tiny else options.size, layers=layers, tokens=tokens)
    rows = []
    for name, way in ways.items():
        if options.ways and not name.startswith(tuple(options.ways)):
            continue
        figures = dict.fromkeys(FIGURES, "")
        try:
            with way(config, samples) as (step, planned):
                seconds, held, waits = measure(step, options.rounds)
                figures["attention"] = attention_of(step)
                if options.profile:
                    measurement.print_profile(name, step, options.profile)
        except torch.OutOfMemoryError:
            print(f"{name}: runs out of memory")
        else:
            figures |= {"seconds": f"{seconds:.4f}", "tokens/s": f"{tokens / seconds:.0f}"}
            figures |= {"TFLOP/s": f"{operations / seconds / 1e12:.3g}", "waits": str(own_syncs(waits).total())}
            figures |= {"all waits": str(waits.total()), "GiB": f"{held:.2f}" if held else ""}
            figures["planned GiB"] = f"{planned:.2f}" if planned else ""
            figures["MFU"] = f"{operations / seconds / peak:.3f}" if peak else ""
            print(f"{name:32}", *(f"{what} {value}  " for what, value in figures.items() if value))
            for (package, line), times in waits.most_common(8):
                print(f"    {times} x {package}: {line}")
        rows.append(model | {"way": name} | figures)
        step = waits = None  # they keep the model in memory
        forget_models()
        gc.collect()
        torch.cuda.empty_cache()
    measurement.append(options.csv, rows)
    shutdown()


if __name__ == "__main__":
    main()
