"""Tokens a second, model FLOPs utilisation and memory of a training step, ours beside others' on the same samples.

What lives here: the clock, and rounds that take every model in turn. What may not: models (`models.py`), FLOPs
(`models/flops.py`), peaks (`planning/hardware.py`).

A step here is forward and backward; `training.py` has whole steps with the optimizer.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.models.flops import Trained, tower_costs
from qwen3vl_bridge.training.metrics import peak_operations

import torch

from tests.parity.batches import Sample

from . import models
from .random_data import make_row, model_config
from .results import Finding, Place, at_least

_FASTER, _MFU = 1.2, 0.45  # goals of the 2B
_WARM, _ROUNDS = 2, 7
_OURS, _THEIRS = "ours, packed", "transformers"

Way = Callable[[list[list[Sample]]], models.Step]  # from the samples of each batch to a step


def compare(place: Place) -> list[Finding]:
    """Ours packed and padded, transformers' with each attention there is, and Megatron-Bridge's own."""
    config = model_config(place)
    samples = make_row(place, config)
    tokens = sum(len(one.ids) for one in samples)
    found = [Finding("samples, tokens", f"{len(samples)}, {tokens}")]
    steps = {}
    for name, way in _ways(place, config, tokens).items():
        try:
            step, held, batches = _fitting(place, way, samples)
        except Exception as error:
            if name != models.UPSTREAM:
                raise
            found.append(Finding(name, f"did not run: {type(error).__name__}: {error}"))
            continue
        if step is None:
            found.append(Finding(name, "runs out of memory, sample by sample too"))
            continue
        steps[name] = step
        if place.device == "cuda":
            found.append(Finding(f"{name}: GiB that a step adds", f"{held / 2**30:.1f}, {batches} batches"))
    seconds = _measure(place, steps, 1 if place.size == "tiny" else _ROUNDS)
    found += [Finding(f"{name}: tokens a second", f"{tokens / took:.0f}") for name, took in seconds.items()]
    return [*found, *_compared(place, seconds), *_utilisation(place, config, samples, seconds.get(_OURS))]


def _ways(place: Place, config: Any, tokens: int) -> dict[str, Way]:
    """Ours packed and padded, transformers' with each attention there is, and Megatron-Bridge's own, by their names.

    A model is built when its first step is.
    """
    mine = cache(lambda: models.ours(place, config, tokens))
    ways: dict[str, Way] = {
        _OURS: lambda parts: models.our_step(mine(), parts, config, packed=True),
        "ours, padded": lambda parts: models.our_step(mine(), parts, config, packed=False),
    }
    for attention in models.attentions():
        theirs = cache(partial(models.theirs, place, config, attention))
        ways[f"{_THEIRS}, {attention}"] = lambda parts, theirs=theirs: models.their_step(theirs(), parts, config)
    ways[models.UPSTREAM] = lambda parts: models.upstream_step(models.upstream(place, config, tokens), parts, config)
    return ways


def _compared(place: Place, seconds: dict[str, float]) -> list[Finding]:
    """Ours packed beside the faster of transformers; if ours does not fit in memory, that is a failure."""
    subject = f"ours packed beside the faster of {_THEIRS}"
    theirs = [took for name, took in seconds.items() if name.startswith(_THEIRS)]
    if _OURS not in seconds:
        return [Finding(subject, "not measured: ours, packed, runs out of memory", "fits in memory", False)]
    if not theirs:
        return [Finding(subject, f"not measured: {_THEIRS} runs out of memory")]
    return [_goal(place, subject, min(theirs) / seconds[_OURS], _FASTER)]


def _fitting(place: Place, way: Way, samples: list[Sample]) -> tuple[models.Step | None, int, int]:
    """A step in as few batches of samples of like length as fit in memory; bytes that it adds, and how many batches."""
    ordered = sorted(samples, key=lambda one: len(one.ids))
    for batches in (1, 2, 3, len(samples)):
        size = -(-len(ordered) // batches)
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        step = None
        try:
            step = way(parts)
            return step, _memory(place, step), len(parts)
        except torch.OutOfMemoryError:
            step = None  # what the error holds too is free when this block is left
        gc.collect()
        torch.cuda.empty_cache()
    return None, 0, 0


def _goal(place: Place, subject: str, value: float, goal: float) -> Finding:
    """Goals are for a GPU and the whole size."""
    if (place.device, place.size) != ("cuda", "full"):
        return Finding(subject, f"{value:.3g}")
    return at_least(subject, value, goal)


def _utilisation(place: Place, config: Any, samples: list[Sample], seconds: float | None) -> list[Finding]:
    if seconds is None:
        return [Finding(f"{_OURS}: MFU of forward and backward", "not measured: it runs out of memory")]
    frames = [math.prod(grid) for one in samples for grid in one.pixels.get("image_grid_thw", torch.empty(0)).tolist()]
    lengths = [len(one.ids) for one in samples]
    operations = tower_costs(config.to_dict(), Trained()).of_many(
        tokens=sum(lengths),
        token_pairs=sum(n**2 for n in lengths),
        patches=sum(frames),
        patch_pairs=sum(n**2 for n in frames),
    )
    found = [Finding(f"{_OURS}: TFLOP/s", f"{operations / seconds / 1e12:.3g}")]
    peak = None if place.device == "cpu" else peak_operations(torch.cuda.get_device_name())
    if peak is not None:
        found.append(_goal(place, f"{_OURS}: MFU of forward and backward", operations / seconds / peak, _MFU))
    return found


def _memory(place: Place, step: models.Step) -> int:
    """Bytes that a step has at most beside what is there after it; its gradients are counted, and are gone then."""
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss = step().item()
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}, expected a number")
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if place.device == "cuda" else 0


def _measure(place: Place, steps: dict[str, models.Step], rounds: int) -> dict[str, float]:
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
