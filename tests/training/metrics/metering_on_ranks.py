"""Run on ranks: what a step held, and which experts its tokens chose, for models that are split.

torchrun --nproc_per_node 2 -m tests.training.metrics.metering_on_ranks OUTPUT HF_FOLDER [DEPTHS]

DEPTHS is a JSON list of [Hugging Face folder, fields], models that are measured one after the other in two stages.
"""

import json
import sys

from qwen3vl_bridge.parallel.collectives import sum_amounts
from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.metrics import Amounts, ExpertLoad, meter_of
from qwen3vl_bridge.training.run_log import ENTRY

import torch

from tests.parity.on_ranks import Split
from tests.parity.references import MICROBATCHES
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.ranks import begin, leave
from tests.steps import followed, forward_backward, train_step

NAMES = ("DP2", "CP2", "TP2+SP+EP2", "PP2", "PP2+VPP2", "EP2")
BALANCE = 0.01


def measure(folder: str, topology: Topology, rows: str, **fields) -> dict:
    """Of a step's forward and backward pass: amounts, and how often each expert was chosen; figures of the next step.

    Args:
        folder: of a model with experts.
        topology: how it is split.
        rows: "padded" or "packed".
        fields: of the provider, beside those of the topology.
    """
    split = Split(folder, Topology(topology.ranks, topology.fields | fields), BALANCE)
    run = split.run
    run.cfg.logger.log_interval = 1
    split.begin(split.batches("mixed", rows), rows)
    load = ExpertLoad(run.model)
    forward_backward(run, run.stream, MICROBATCHES // run.groups.dp.size())
    counts = load.counts(run.cfg.model)
    amounts = sum_amounts(meter_of(run.state).take().values(), run.groups)
    with followed(run, training_callbacks(run.cfg)) as shared:
        train_step(run)
    return dict(amounts=Amounts(*amounts), counts=counts, figures=shared[ENTRY])


def main(output: str, folder: str, depths: str = "") -> None:
    if depths:
        found = [measure(one, TOPOLOGIES["PP2"], "packed", **fields)["figures"] for one, fields in json.loads(depths)]
    else:
        found = {name: measure(folder, TOPOLOGIES[name], "packed") for name in NAMES}
    # The last rank: it has neither the first stage nor the first tokens.
    leave(found, output, writer=torch.distributed.get_world_size() - 1)


if __name__ == "__main__":
    begin()
    main(*sys.argv[1:])
