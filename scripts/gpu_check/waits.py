"""Where a whole training step makes the host wait for the device, as torch's own detector says.

What lives here: counting. What may not: counting without a GPU, and whose line a wait is, which are those of
`tests/host_waits`: all that is not megatron-core's or Megatron-Bridge's is ours, also where no line is known.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.run_settings import GuardConfig

import torch

from examples.digits.checkpoint import make_checkpoint
from tests.host_waits.places import UPSTREAM, place_in_code
from tests.parity.on_ranks import Split
from tests.parity.topologies import Topology
from tests.ranks import forget_models
from tests.steps import followed, step_with_callbacks

from .results import Finding, Place, at_most

_OPTIONS = {"dense": {}, "moe": {"moe": True}, "qwen3_5": {"family": "qwen3_5"}}
_STEPS = 3  # the last is counted; those before it find kernels and allocate
_SHOWN = 8  # lines that the table names


def look(place: Place, kind: str) -> list[Finding]:
    """All are megatron-core's or Megatron-Bridge's lines, such as those of megatron-core's experts; they are listed.

    Args:
        place: where.
        kind: "dense", "moe" or "qwen3_5".
    """
    found = _waits(make_checkpoint(place.work / f"waits_{kind}", **_OPTIONS[kind]))
    ours = of_us(found).total()
    where = "; ".join(f"{times} x {package}: {line}" for (package, line), times in found.most_common(_SHOWN))
    return [
        at_most("not of megatron-core or Megatron-Bridge, in a step", float(ours), 0.0),
        Finding("of all packages", str(found.total())),
        *([Finding("where", where)] if where else []),
    ]


def of_us(found: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """What our lines cause, in transformers too, and what no line is known of, such as a gradient made in C++.

    Args:
        found: how often each (package, line) waits.
    """
    return Counter({place: times for place, times in found.items() if place[0] not in UPSTREAM})


def _waits(folder: object) -> Counter[tuple[str, str]]:
    """How often each (package, line) of a packed step with copy, guard and distributed optimizer waits, in bf16."""
    forget_models()
    topology = Topology(1, distributed_optimizer=True)
    split = Split(str(folder), topology, mixed_precision="bf16_mixed", train__train_iters=_STEPS)
    run = split.run
    run.cfg.guard, run.cfg.logger.log_interval = GuardConfig(on_nan="skip"), _STEPS + 1
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    run.stream = split.batches("mixed", "packed", steps=_STEPS)
    found: Counter[tuple[str, str]] = Counter()
    with followed(run, training_callbacks(run.cfg)):
        for number in range(_STEPS):
            with noted(found) if number == _STEPS - 1 else contextlib.nullcontext():
                step_with_callbacks(run)
    return found


@contextlib.contextmanager
def noted(found: Counter[tuple[str, str]]) -> Iterator[None]:
    """Count the waits in the body by package and line; without a GPU torch reports none.

    Args:
        found: is added to.
    """

    def note(message: Warning | str, *_: object) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            package, line, _ = place_in_code()
            found[package, line] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
