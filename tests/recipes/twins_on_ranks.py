"""Run by torchrun: one training step of recipes' twins.

torchrun --nproc_per_node N -m tests.recipes.twins_on_ranks OUTPUT NAMES FOLDERS DATA

NAMES is a JSON list of recipes for N ranks; FOLDERS a JSON object with the tiny checkpoint of each family.
"""

from __future__ import annotations

import json
import sys

from qwen3vl_bridge.logs import quiet
from qwen3vl_bridge.training.loop import set_up, train_step

import torch
import torch.distributed as dist

from .twin import family, pattern, twin

# Adapters' parts that a first step need not move: one has no gradient yet, the other moves less than bfloat16 shows.
SLOW = ("adapter.linear_in.weight", "adapter.weight_magnitude")


def main(output: str, names: list[str], folders: dict[str, str], data: str) -> None:
    """Rank 0 writes loss and gradient norm of each."""
    found = {}
    # Groups of one kind after the other: each kind is made anew.
    for name in sorted(names, key=lambda name: (str(pattern(name)), name)):
        run = set_up(twin(name, folders[family(name)], data))
        parameters = [named for chunk in run.model for named in chunk.named_parameters()]
        before = [parameter.detach().clone() for _, parameter in parameters]
        entry = train_step(run)
        changed = [not torch.equal(old, new) for old, (_, new) in zip(before, parameters, strict=True)]
        trained = [p.requires_grad and not name.endswith(SLOW) for name, p in parameters]
        found[name] = dict(
            loss=entry["loss"],
            grad_norm=entry["grad_norm"],
            trained=sum(trained),
            changed=sum(new and ours for new, ours in zip(changed, trained, strict=True)),
            strayed=sum(new and not p.requires_grad for new, (_, p) in zip(changed, parameters, strict=True)),
        )
        if dist.get_rank() == 0:
            print(name, found[name], flush=True)
    if dist.get_rank() == 0:
        torch.save(found, output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
