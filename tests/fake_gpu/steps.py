"""Training steps of tiny models on the fake GPU, in Megatron-Bridge's loop: `steps.py FOLDER CASE...`.

The third step of each case is marked in the log; the first two compile kernels and allocate.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.rehearsal import fake_gpu
from qwen3vl_bridge.training.callbacks import callbacks_of

from torch._dynamo.utils import counters

from examples.digits.checkpoint import make_checkpoint
from tests.fake_gpu.conftest import leave
from tests.host_waits.counter import UPSTREAM, place_in_code
from tests.parity.on_ranks import Split
from tests.parity.topologies import Topology
from tests.ranks import forget_models
from tests.steps import followed, step_with_callbacks

OPTIONS = {"dense": {}, "qwen3_5": {"family": "qwen3_5"}}
STEPS = 3


def last_step(case: str, folder: Path) -> dict[str, Any]:
    """Of the last step of a case, "kind rows": which functions wait, and how many graphs are compiled."""
    kind, rows = case.split()
    make_checkpoint(folder, **OPTIONS[kind])
    topology = Topology(1, distributed_optimizer=True)
    split = Split(str(folder), topology, mixed_precision="bf16_mixed", train__train_iters=STEPS)
    run = split.run
    # Losses that a kernel would compute are garbage, so nothing may judge them.
    run.cfg.guard, run.cfg.logger.log_interval = None, STEPS + 1
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    run.stream = split.batches("mixed", rows, steps=STEPS)
    waits: Counter[tuple[str, str, str]] = Counter()
    with followed(run, callbacks_of(run.cfg)):
        for number in range(STEPS):
            fake_gpu.mark(f"{case}: step {number}")
            waits.clear()
            graphs = counters["stats"]["unique_graphs"]
            with fake_gpu.on_wait(lambda _: waits.update([place_in_code()])):
                step_with_callbacks(run)
        fake_gpu.mark(f"{case}: end")
    forget_models()
    ours = {function: times for (package, _, function), times in waits.items() if package not in UPSTREAM}
    return {"waits": ours, "compiled": counters["stats"]["unique_graphs"] - graphs}


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    found = {case: last_step(case, Path(folder) / case) for case in cases}
    leave(found)
