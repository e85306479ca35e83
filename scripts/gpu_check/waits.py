"""Where a training step's forward and backward make the host wait for the device, as torch's own detector says.

What lives here: counting. What may not: counting without a GPU, which tests do.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.training.step import to_device

import torch
from transformers import AutoConfig

from examples.digits.checkpoint import make_checkpoint
from tests.parity.batches import make_batch, make_samples

from . import models
from .results import Finding, Place, at_most

_KINDS = {"dense": {}, "moe": {"moe": True}, "qwen3_5": {"family": "qwen3_5"}}


def look(place: Place) -> list[Finding]:
    """Of each kind of model; a dense one may wait nowhere, megatron-core's experts do."""
    found = []
    for kind, options in _KINDS.items():
        config = AutoConfig.from_pretrained(make_checkpoint(place.work / f"waits_{kind}", **options))
        places = _waits(place, config)
        where = "; ".join(f"{times} x {line}" for line, times in places.most_common(8))
        if kind == "dense":
            found.append(at_most("dense: host waits", float(places.total()), 0.0))
        else:
            found.append(Finding(f"{kind}: host waits", str(places.total())))
        if where:
            found.append(Finding(f"{kind}: where", where))
    return found


def _waits(place: Place, config: object) -> Counter[str]:
    """How often each line of a step waits, the second time that it runs."""
    model = models.ours(place, config, 2048)
    batch = make_batch(make_samples("mixed", config, seed=5), config, packed=True)
    inputs = to_device(batch.local(), model)
    places: Counter[str] = Counter()

    def note(message: Warning | str, category: type, filename: str, line: int, *_: object) -> None:
        if "synchroniz" in str(message):
            frames = [one for one in traceback.extract_stack() if "warnings" not in one.filename][:-1]
            named = [one for one in frames if "/torch/" not in one.filename][-1:]
            places.update(f"{one.filename.rpartition('site/')[2]}:{one.lineno}" for one in named)

    for number in range(2):
        model.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            if number and place.device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            try:
                (model(inputs=inputs) * inputs.loss_mask).sum().backward()
            finally:
                if place.device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
    return places
