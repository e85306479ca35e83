"""Run on ranks, or alone: a whole step of Megatron-Bridge's, its waits counted.

torchrun --nproc_per_node N -m tests.host_waits.on_ranks OUTPUT CASES FOLDERS

CASES is a JSON list of [family, topology, rows]; FOLDERS a JSON object with the Hugging Face folder of each family.
What is counted is the third step of four, and the fourth, which takes figures: with the guard, recorded losses, norms
of parts, meters and the log. Of rows "presharded", which are tensors on the device, it is one call of the model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from qwen3vl_bridge.training.before_step import optimizers_of
from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.run_settings import GuardConfig

import torch.distributed as dist

from tests.parity.on_ranks import Split
from tests.parity.references import MICROBATCHES
from tests.parity.topologies import MODULES, TOPOLOGIES, Topology
from tests.ranks import begin, leave
from tests.steps import followed, step_with_callbacks

from .counter import HostWaits
from .places import Seen

STEPS, INTERVAL = 4, 2
CONTENT = "mixed"


def count_step(folder: str, topology: Topology, rows: str, **settings: Any) -> dict[str, Seen]:
    """Train four steps; returns what was counted in a step without figures, "step", and in one with, "figures"."""
    settings = dict(train__train_iters=STEPS, logger__log_interval=INTERVAL) | settings
    split = Split(folder, topology, **settings)
    run = split.run
    read: list[None] = []
    run.stream = (read.append(None) or batch for batch in split.batches(CONTENT, rows, steps=STEPS))
    run.cfg.guard = GuardConfig(on_nan="skip")
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    found = {}
    # Each optimizer has lists and dicts of tensors, and single ones.
    waits = HostWaits(*run.model, [list(vars(one).values()) for one in optimizers_of(run.optimizer)])
    with waits, followed(run, training_callbacks(run.cfg)):
        for step in range(1, STEPS + 1):
            waits.begin()
            step_with_callbacks(run)
            # Copies run ahead of the GPU, reading does not: a resumed run would skip what was read and not saved.
            assert topology.ranks > 1 or len(read) == step * MICROBATCHES
            found["figures" if step % INTERVAL == 0 else "step"] = waits.seen()
    return found


def count_call(folder: str, topology: Topology) -> dict[str, Seen]:
    """Forward and backward of a rank's share of a packed row, as RL frameworks give it."""
    split = Split(folder, topology)
    model, groups = split.run.model[0], split.run.groups
    arguments = next(split.batches(CONTENT, "presharded", steps=1)).arguments(groups.cp.size(), groups.cp.rank())
    with HostWaits(model, arguments, vars(arguments["packed_seq_params"])) as waits:
        model(**arguments).sum().backward()
    return {"call": waits.seen()}


def main(output: str, cases: list[list[str]], folders: dict[str, str]) -> None:
    """Every case; rank 0 writes what all ranks have found."""
    found = {}
    for family, name, rows in cases:
        topology = (TOPOLOGIES | MODULES)[name]
        call = rows == "presharded"
        counted = count_call(folders[family], topology) if call else count_step(folders[family], topology, rows)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, counted)
        found[family, name, rows] = everyone
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
