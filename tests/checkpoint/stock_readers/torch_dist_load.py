"""On several ranks, stock megatron-core loads torch_dist checkpoints of ours, strictly.

    python torch_dist_load.py [[HF_FOLDER, MEGATRON_FOLDER, {SETTING: VALUE, ...}, FOLDER_TO_SAVE_TO or null], ...]

Every parameter and buffer is then compared, bit for bit, with a model that Megatron-Bridge has filled from the Hugging
Face folder itself. Where there is a folder to save to, all weights are doubled and saved by megatron-core, together
with the state of its optimizer; and a single process has Megatron-Bridge build and fill a model from the checkpoint.
"""

import json
import math
import os
import sys
import tempfile
from typing import Any

import qwen3vl_bridge  # noqa: F401
from qwen3vl_bridge.training.process_groups import initialize, shutdown

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.training.model_load_save import load_megatron_model
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import unwrap_model

# What Megatron-Bridge passes on.
METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def same(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    found = model.state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def save_doubled(model: torch.nn.Module, provider: Any, groups: Any, folder: str) -> None:
    ddp = DistributedDataParallel(provider, DistributedDataParallelConfig(), model, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.0), [ddp], use_gloo_process_groups=False)
    for parameter in model.parameters():
        parameter.main_grad.fill_(0.5)
    optimizer.step()  # makes its state; at that rate it changes nothing
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    state = {"model": model.sharded_state_dict(metadata=METADATA | {"dp_cp_group": groups.dp_cp})}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=METADATA)
    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    dist_checkpointing.save(state, folder)


def rank_main(
    rank: int, world: int, store: str, hf_folder: str, folder: str, settings: dict[str, Any], save_to: str | None
) -> None:
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
    if not same(model, expected):
        raise AssertionError(f"rank {rank} with {settings}")
    counts: list = [None] * world
    dist.all_gather_object(counts, len(expected))
    if rank == 0:
        # One write with its newline in it, so that it stays one line.
        sys.stdout.write(f"same: {counts} with {json.dumps(settings)}\n")
        sys.stdout.flush()
    if save_to is not None:
        save_doubled(model, provider, groups, save_to)
    if save_to is not None and world == 1:
        (loaded,) = load_megatron_model(f"{folder}/iter_0000000", use_cpu_init=True)
        if not same(unwrap_model([loaded])[0], expected):
            raise AssertionError(f"{folder} by Megatron-Bridge")
        sys.stdout.write(f"same by Megatron-Bridge: {folder}\n")
        sys.stdout.flush()
    shutdown()


if __name__ == "__main__":
    # Forked, so that Megatron, which takes long to import, is imported once.
    for hf_folder, folder, settings, save_to in json.loads(sys.argv[1]):
        world = math.prod(value for name, value in settings.items() if name.endswith("parallel_size"))
        with tempfile.TemporaryDirectory() as scratch:
            arguments = (world, f"{scratch}/store", hf_folder, folder, settings, save_to)
            torch.multiprocessing.start_processes(rank_main, arguments, nprocs=world, start_method="fork")
