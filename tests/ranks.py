"""What a module of the tests that runs on ranks begins and ends with, and what one model leaves to the next."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

from qwen3vl_bridge.compat.library_logs import quiet

import torch
import torch.distributed as dist


def set_threads() -> None:
    """As the environment says; else one.

    Workers and ranks share the machine's cores, and the tiny models gain nothing from more.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


def begin() -> None:
    """Say little, and leave the cores to the other ranks."""
    quiet()
    set_threads()
    # Or the process that saving spawns would import what this program imports, Megatron, for each rank.
    program = sys.modules["__main__"]
    program.__spec__ = program.__file__ = None


def forget_models() -> None:
    """Let the next model of this process begin as the first: megatron-core keeps three things of one in the process.

    It writes a model's `attention_backend` into NVTE_* variables, and refuses to build a model that wants another; its
    tracker of balancing losses has an entry for each loss that any model had; and the scale of their gradients has the
    shape that the first backward pass gave it, which that of a schedule does not fit.
    """
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
    if "megatron.core.transformer.moe.moe_logging" in sys.modules:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        destroy_moe_metrics_tracker()
        MoEAuxLossAutoScaler.main_loss_backward_scale = None


def leave_groups() -> None:
    """Destroy all groups but that of all processes: megatron-core and Megatron-Bridge keep them. A collective call.

    A gloo group has three threads that poll a hundred times per second, and a model's groups are dozens.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    parallel_state.destroy_model_parallel()
    BridgeCommunicator._broadcast_pg_cache.clear()
    BridgeCommunicator._bridge_pg_cache.clear()
    _clear_sharding_prop_cache()  # torch would give results of later, equal meshes the mesh of the destroyed groups
    left = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    if left:
        gc.collect()  # a deleted model in a reference cycle would hold them
        dist.barrier()
        for group in left:
            dist.destroy_process_group(group)


def of_all_ranks(found: Any) -> list[Any]:
    """What each rank has found, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def largest(errors: dict[str, float]) -> dict[str, float]:
    """Of all ranks, on every rank."""
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(errors, values.tolist(), strict=True))


def leave(found: Any, output: str | Path) -> None:
    """Leave together; the first rank writes what it has found."""
    if dist.get_rank() == 0:
        torch.save(found, output)
    dist.barrier()
    dist.destroy_process_group()
