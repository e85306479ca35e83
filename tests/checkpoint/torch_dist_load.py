"""On several ranks, stock megatron-core loads a torch_dist checkpoint of ours, strictly.

    python torch_dist_load.py [[HF_FOLDER, MEGATRON_FOLDER, {SETTING: VALUE, ...}], ...]

Every parameter and buffer is then compared, bit for bit, with a model that Megatron-Bridge has filled from the Hugging
Face folder itself.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from typing import Any

import qwen3vl_bridge  # noqa: F401
from qwen3vl_bridge.training.process_group import initialize, shutdown

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model

# What Megatron-Bridge passes on.
METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def rank_main(rank: int, world: int, store: str, hf_folder: str, folder: str, settings: dict[str, Any]) -> None:
    """Load and compare."""
    os.environ["WORLD_SIZE"] = str(world)  # as of a process that torchrun started
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    provider = AutoBridge.from_hf_pretrained(hf_folder).to_megatron_provider(load_weights=True)
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    (wrapped,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups
    )
    (model,) = unwrap_model([wrapped])
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
    for parameter in model.parameters():
        parameter.data.fill_(7)
    metadata = METADATA | {"dp_cp_group": groups.dp_cp}
    state = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata=metadata)}, f"{folder}/iter_0000000", strict="raise_all"
    )
    model.load_state_dict(state["model"], strict=True)
    for name, tensor in expected.items():
        if not torch.equal(model.state_dict()[name], tensor):
            raise AssertionError(f"{name} on rank {rank} with {settings}")
    counts: list = [None] * world
    dist.all_gather_object(counts, len(expected))
    if rank == 0:
        # One write with its newline in it, so that it stays one line.
        sys.stdout.write(f"same: {counts} with {json.dumps(settings)}\n")
        sys.stdout.flush()
    shutdown()


if __name__ == "__main__":
    # Forked, so that Megatron, which takes long to import, is imported once.
    for hf_folder, folder, settings in json.loads(sys.argv[1]):
        sizes = (value for name, value in settings.items() if name.endswith("parallel_size"))
        world = math.prod(sizes)
        with tempfile.TemporaryDirectory() as scratch:
            arguments = (world, f"{scratch}/store", hf_folder, folder, settings)
            torch.multiprocessing.start_processes(rank_main, arguments, nprocs=world, start_method="fork")
