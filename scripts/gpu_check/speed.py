"""Tokens a second, model FLOPs utilisation and memory of a training step, ours beside others' on the same samples.

What lives here: the clock, and rounds that take every model in turn. What may not: models (`models.py`), FLOPs
(`models/common/flops.py`), peaks (`planning/hardware.py`).

A step here is forward and backward; `training.py` has whole steps with the optimizer.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.models.common.flops import Trained, tower_costs
from qwen3vl_bridge.training.monitoring.throughput import peak_operations

import torch

from tests.parity.batches import Sample

from . import models
from .random_data import make_row, model_config
from .results import Finding, Place, at_least

_FASTER, _MFU = 1.2, 0.45  # goals of the 2B
_WARM, _ROUNDS = 2, 7


def compare(place: Place) -> list[Finding]:
    """Ours packed and padded, transformers' with each attention there is, and Megatron-Bridge's own."""
    config = model_config(place)
    samples = make_row(place, config)
    tokens = sum(len(one.ids) for one in samples)
    mine = models.ours(place, config, tokens)
    steps = {
        "ours, packed": models.our_step(mine, samples, config, packed=True),
        "ours, padded": models.our_step(mine, samples, config, packed=False),
    }
    for attention in models.attentions():
        steps[f"transformers, {attention}"] = models.their_step(
            models.theirs(place, config, attention), samples, config
        )
    found = [Finding("samples, tokens", f"{len(samples)}, {tokens}")]
    try:
        own = models.upstream(place, config, tokens)
        models.upstream_step(own, samples, config)()
        steps["Megatron-Bridge's own"] = models.upstream_step(own, samples, config)
    except Exception as error:
        found.append(Finding("Megatron-Bridge's own model", f"did not run: {type(error).__name__}: {error}"))
    memory = {name: _memory(place, step) for name, step in steps.items()}
    seconds = _measure(place, steps, 1 if place.size == "tiny" else _ROUNDS)
    for name, took in seconds.items():
        found.append(Finding(f"{name}: tokens a second", f"{tokens / took:.0f}"))
        if place.device == "cuda":
            found.append(Finding(f"{name}: GiB that a step adds", f"{memory[name] / 2**30:.1f}"))
    best = min(took for name, took in seconds.items() if name.startswith("transformers"))
    found.append(_goal(place, "ours packed beside the faster of transformers", best / seconds["ours, packed"], _FASTER))
    return found + _utilisation(place, config, samples, seconds["ours, packed"])


def _goal(place: Place, subject: str, value: float, goal: float) -> Finding:
    """Goals are for a GPU and the whole size."""
    if (place.device, place.size) != ("cuda", "full"):
        return Finding(subject, f"{value:.3g}")
    return at_least(subject, value, goal)


def _utilisation(place: Place, config: Any, samples: list[Sample], seconds: float) -> list[Finding]:
    frames = [math.prod(grid) for one in samples for grid in one.pixels.get("image_grid_thw", torch.empty(0)).tolist()]
    lengths = [len(one.ids) for one in samples]
    operations = tower_costs(config.to_dict(), Trained()).of_many(
        tokens=sum(lengths),
        token_pairs=sum(n**2 for n in lengths),
        patches=sum(frames),
        patch_pairs=sum(n**2 for n in frames),
    )
    found = [Finding("ours, packed: TFLOP/s", f"{operations / seconds / 1e12:.3g}")]
    peak = None if place.device == "cpu" else peak_operations(torch.cuda.get_device_name())
    if peak is not None:
        found.append(_goal(place, "ours, packed: MFU of forward and backward", operations / seconds / peak, _MFU))
    return found


def _memory(place: Place, step: Callable[[], torch.Tensor]) -> int:
    """Bytes that a step has at most beside what was there before; its gradients are counted, and are gone after it."""
    if place.device == "cpu":
        return 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = step().item()
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}, expected a number")
    return torch.cuda.max_memory_allocated() - before


def _measure(place: Place, steps: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Median seconds of each, in rounds that take every one in turn, after some that do not count."""
    warm, taken = 1 if place.size == "tiny" else _WARM, {name: [] for name in steps}
    for number in range(warm + rounds):
        for name, step in steps.items():
            wait(place)
            begun = time.perf_counter()
            step()
            wait(place)
            if number >= warm:
                taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in taken.items()}


def wait(place: Place) -> None:
    """Until the device has done what it was given."""
    if place.device == "cuda":
        torch.cuda.synchronize()
