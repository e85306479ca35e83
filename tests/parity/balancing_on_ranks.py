"""Run on ranks: gradients where the experts' balancing loss outweighs the other, split beside one process.

    torchrun --nproc_per_node 1 -m tests.parity.balancing_on_ranks REFERENCE HF_FOLDER
    torchrun --nproc_per_node 2 -m tests.parity.balancing_on_ranks OUTPUT HF_FOLDER REFERENCE

It depends on which tokens are padding, and on how the tokens of all ranks are counted.
"""

import sys

from qwen3vl_bridge.training.loop import forward_backward

import torch

from tests.ranks import begin, leave

from .on_ranks import Split, worst
from .references import MICROBATCHES
from .topologies import TOPOLOGIES, Topology

BALANCE, CONTENT, ROWS = 0.5, "mixed", ("padded", "packed")


def gradients(split: Split, rows: str) -> dict[str, torch.Tensor]:
    """Of the first step."""
    split.begin(split.batches(CONTENT, rows), rows)
    count = MICROBATCHES // split.run.groups.dp.size()
    forward_backward(split.run, split.run.stream, count, forward_only=False)
    return split.gradients()


def main(output: str, folder: str, reference: str | None = None) -> None:
    """Alone, save gradients; on two ranks, the largest errors of each way to split."""
    if reference is None:
        split = Split(folder, Topology(1), BALANCE)
        found = {rows: gradients(split, rows) for rows in ROWS}
    else:
        expected, found = torch.load(reference), {}
        for name, topology in TOPOLOGIES.items():
            if topology.ranks == 2 and "MoE" in topology.families and not topology.distributed_optimizer:
                split = Split(folder, topology, BALANCE)
                for rows in ROWS:
                    found[name, rows] = worst(gradients(split, rows), expected[rows])
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(*sys.argv[1:])
