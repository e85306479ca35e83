"""Compare a full training step on the CPU, with its optimizer, with transformers, packed and padded.

    python -m benchmarks.training_step
    python -m benchmarks.training_step --rounds 3 --csv /tmp/training_step.csv
    python -m benchmarks.training_step --profile "ours, packed" "ours, padded"

A model of 83 million parameters in float32 and twelve samples with up to three images of uneven size, in one row of
packed samples or in twelve padded to the longest. The packed row of transformers has a block-diagonal mask. All four
compute the same loss, which is checked first; then they take steps in turn. Prints the median, its ratio to
ours, and the smallest and largest ratio of two steps of a round. AdamW is torch's function in all four, by
`upstream/adam.py` for ours.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import qwen3vl_bridge  # noqa: F401  (registers our model)
from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.models.qwen3_vl.presets import hf_config
from qwen3vl_bridge.training.process_groups import shutdown
from qwen3vl_bridge.upstream.adam import Adam

import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from torch import Tensor

from benchmarks import measurement

_IMAGE, _VIDEO, _START, _END, _PAD = 32_001, 32_002, 32_003, 32_004, 32_005
_MERGE, _GRID = 2, 48
_ADAM: dict[str, Any] = dict(lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def configuration() -> Any:
    """Return the configuration of a Qwen3-VL with 83 million parameters."""
    config = hf_config("2B")
    text, vision = config.text_config, config.vision_config
    text.update(dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=12, vocab_size=32_768))
    text.update(dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64, dtype="float32"))
    text.rope_parameters["mrope_section"] = [12, 10, 10]
    text.bos_token_id, text.eos_token_id, text.pad_token_id = _PAD, _PAD, _PAD
    vision.update(dict(hidden_size=384, intermediate_size=1536, depth=8, num_heads=6, out_hidden_size=512))
    vision.deepstack_visual_indexes = [2, 4, 6]
    config.image_token_id, config.video_token_id = _IMAGE, _VIDEO
    config.vision_start_token_id, config.vision_end_token_id = _START, _END
    return config


def make_samples(count: int) -> list[EncodedSample]:
    """Return samples of 20 to 400 tokens: text around up to three images of 64 to 384 pixels a side."""
    rng = torch.Generator().manual_seed(0)

    def text(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (), generator=rng))
        return torch.randint(0, 32_000, (length,), generator=rng).tolist()

    samples = []
    for number in range(count):
        ids, grids = text(10, 60), []
        for _ in range(int(torch.randint(4, (), generator=rng))):
            height, width = torch.randint(2, 13, (2,), generator=rng).tolist()
            ids += [_START, *[_IMAGE] * (height * width), _END, *text(5, 60)]
            grids.append([1, _MERGE * height, _MERGE * width])
        tokens, pictures = torch.tensor(ids), torch.tensor(grids) if grids else None
        pixels = None if pictures is None else torch.randn(int(pictures.prod(-1).sum()), 1536, generator=rng)
        counted = torch.ones(len(ids))
        counted[-1] = 0.0
        samples.append(EncodedSample(tokens, tokens.roll(-1), counted, pixels, pictures, f"sample {number}"))
    return samples


def ours(config: Any, reference: Any, samples: list[EncodedSample]) -> tuple[Any, dict[str, Any]]:
    """Return our model with the weights of `reference`, and functions that compute its loss, by name."""
    longest, whole = -(-max(map(len, samples)) // 8) * 8, sum(-(-len(s) // 8) * 8 for s in samples)
    model = measurement.build_model(config, whole)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        AutoBridge.from_hf_pretrained(folder).load_hf_weights([model])
    settings = VisionSettings(_IMAGE, _VIDEO, _MERGE, _GRID**2)

    def loss(row: int, *, packed: bool) -> Tensor:
        collator = Collator(settings, _PAD, row, multiple=8, pixel_dtype=torch.float32)
        collate = collator.collate_packed if packed else collator.collate_padded
        inputs = collate(samples).local()
        return (model(inputs=inputs) * inputs.loss_mask).sum() / inputs.loss_mask.sum()

    return model, {
        "ours, packed": lambda: loss(whole, packed=True),
        "ours, padded": lambda: loss(longest, packed=False),
    }


def of_transformers(config: Any, samples: list[EncodedSample]) -> tuple[Any, dict[str, Callable[[], Tensor]]]:
    """Return transformers' model with scaled_dot_product_attention, and functions that compute its loss, by name."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float().train()
    grids = torch.cat([s.image_grid_thw for s in samples if s.image_grid_thw is not None])
    pixels = torch.cat([s.pixel_values for s in samples if s.pixel_values is not None])
    lengths = [len(s) for s in samples]
    rows = torch.full((len(samples), max(lengths)), _PAD)
    counted = torch.zeros(rows.shape)
    for row, mask, sample in zip(rows, counted, samples, strict=True):
        row[: len(sample)], mask[: len(sample)] = sample.input_ids, sample.loss_mask
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    row, row_counted = rows[real][None], counted[real][None]
    sample_of = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
    blocks = torch.block_diag(*[torch.ones(n, n) for n in lengths]).bool().tril()[None, None]
    positions = model.model.get_rope_index(
        rows, mm_token_type_ids=(rows == _IMAGE).int(), image_grid_thw=grids, attention_mask=real.long()
    )[0]
    packed_positions = positions[:, real][:, None]
    assert len(sample_of) == row.size(1)

    def loss(ids: Tensor, mask: Tensor, **arguments: Any) -> Tensor:
        kinds = (ids == _IMAGE).int()
        given = dict(mm_token_type_ids=kinds, pixel_values=pixels, image_grid_thw=grids, use_cache=False)
        logits = model(input_ids=ids, **given, **arguments).logits
        losses = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()

    return model, {
        "transformers, padded": lambda: loss(rows, counted, attention_mask=real.long()),
        "transformers, packed": lambda: loss(row, row_counted, attention_mask=blocks, position_ids=packed_positions),
    }


def timed_step(loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a training step. Other processes disturb CPU seconds less."""
    begun, worked = time.perf_counter(), time.process_time()
    optimizer.zero_grad(set_to_none=True)
    loss_of().backward()
    optimizer.step()
    return time.perf_counter() - begun, time.process_time() - worked


def main() -> None:
    """Measure all implementations, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "training_step.csv", rounds=5)
    parser.add_argument("--samples", type=int, default=12, help="number of samples (default: %(default)s)")
    parser.add_argument("--profile", nargs="+", metavar="WAY", help="only profile these, such as 'ours, packed'")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config, samples = configuration(), make_samples(options.samples)
    reference, ways = of_transformers(config, samples)
    model, more = ours(config, reference, samples)
    optimizers = {name: torch.optim.AdamW(reference.parameters(), **_ADAM) for name in ways}
    shared = Adam(model.parameters(), **_ADAM)
    ways = more | ways
    losses = {name: way().item() for name, way in ways.items()}
    print(f"{sum(p.numel() for p in reference.parameters()) / 1e6:.1f} M parameters, {sum(map(len, samples))} tokens")
    print(f"losses: {losses}")
    assert max(losses.values()) - min(losses.values()) < 1e-4
    for name in options.profile or ():
        measurement.print_profile(name, partial(timed_step, ways[name], optimizers.get(name, shared)))
    if options.profile:
        return
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            seconds = timed_step(way, optimizers.get(name, shared))
            if number:
                taken[name].append(seconds)
    medians = {
        name: [statistics.median(column) for column in zip(*times, strict=True)] for name, times in taken.items()
    }
    lines = []
    for name, measured in medians.items():
        wall, cpu = (seconds / base for seconds, base in zip(measured, medians["ours, packed"], strict=True))
        of_rounds = [step[0] / first[0] for step, first in zip(taken[name], taken["ours, packed"], strict=True)]
        print(
            f"{name:22} {measured[0]:7.2f} s  {measured[1]:7.2f} s CPU   {wall:5.2f} ({min(of_rounds):.2f} to "
            f"{max(of_rounds):.2f}), CPU {cpu:5.2f} x ours packed"
        )
        lines.append(
            {
                "parameters": sum(p.numel() for p in reference.parameters()),
                "samples": len(samples),
                "tokens": sum(map(len, samples)),
                "longest": max(map(len, samples)),
                "rounds": options.rounds,
                "way": name,
                "seconds": f"{measured[0]:.3f}",
                "CPU seconds": f"{measured[1]:.3f}",
                "of ours packed": f"{wall:.2f}",
                "CPU of ours packed": f"{cpu:.2f}",
                "least of a round": f"{min(of_rounds):.2f}",
                "most of a round": f"{max(of_rounds):.2f}",
                "load": measurement.load(),
            }
        )
    measurement.append(options.csv, lines)
    shutdown()


if __name__ == "__main__":
    main()
