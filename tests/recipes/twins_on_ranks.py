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


def main(output: str, names: list[str], folders: dict[str, str], data: str) -> None:
    """Rank 0 writes loss and gradient norm of each."""
    found = {}
    # Groups of one kind after the other: each kind is made anew.
    for name in sorted(names, key=lambda name: (str(pattern(name)), name)):
        run = set_up(twin(name, folders[family(name)], data))
        before = [parameter.detach().clone() for chunk in run.model for parameter in chunk.parameters()]
        entry = train_step(run)
        after = [parameter for chunk in run.model for parameter in chunk.parameters()]
        changed = sum(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
        trained = sum(parameter.requires_grad for parameter in after)
        found[name] = dict(loss=entry["loss"], grad_norm=entry["grad_norm"], changed=changed, trained=trained)
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
