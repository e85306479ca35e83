"""Run on two ranks: what is sent in a step of two data-parallel replicas, whose other groups have one rank each.

torchrun --nproc_per_node 2 -m tests.training.lone_groups_on_ranks OUTPUT FOLDER

FOLDER is a Hugging Face model with experts. Each rank counts the second step, with guard, norms and figures of the log.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.run_settings import GuardConfig

import torch.distributed as dist

from tests.host_waits.counter import PACKAGES
from tests.parity.on_ranks import Split
from tests.parity.topologies import Topology
from tests.ranks import begin, leave
from tests.steps import followed, step_with_callbacks

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "barrier", "all_to_all", "all_to_all_single", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast_object_list", "gather_object"),
)
Sent = Counter[tuple[str, str, str, int]]


@contextmanager
def collectives_sent() -> Iterator[Sent]:
    """How often each package has called a collective in the body, by package, file, collective and ranks."""
    found: Sent = Counter()
    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, _watched(name, getattr(dist, name), found)))
        yield found


def _watched(name: str, collective: Callable, found: Sent) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while (path := frame.f_code.co_filename).endswith("/compat/cpu.py") or "/torch/" in path:
            frame = frame.f_back
        owner = next((owner for owner, folder in PACKAGES.items() if folder in path), "others")
        group = inspect.signature(collective).bind(*args, **kwargs).arguments.get("group")
        found[owner, path.rpartition("/")[2], name, dist.get_world_size(group)] += 1
        return collective(*args, **kwargs)

    return call


def main(output: str, folder: str) -> None:
    """Two steps; rank 0 writes what all ranks have sent in the second."""
    split = Split(folder, Topology(2), balance=0.01, logger__log_interval=1)
    run = split.run
    run.stream = split.batches("mixed", "packed")
    run.cfg.guard = GuardConfig(on_nan="skip", on_spike="skip")
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    with collectives_sent() as found, followed(run, training_callbacks(run.cfg)):
        step_with_callbacks(run)
        found.clear()
        step_with_callbacks(run)
        counted = dict(found)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, counted)
    leave(everyone, output)


if __name__ == "__main__":
    begin()
    main(*sys.argv[1:])
