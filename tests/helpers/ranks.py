"""Set up and clean up processes that run on ranks, and what megatron-core keeps between models."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

from qwen3vl_bridge.upstream.library_logs import quiet

import torch
import torch.distributed as dist


def set_threads() -> None:
    """Use OMP_NUM_THREADS threads, or one.

    Test workers and ranks share the machine's cores, and tiny models gain nothing from more threads.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


def begin() -> None:
    """Silence other libraries and set the number of threads."""
    quiet()
    set_threads()
    # Or the process that saving spawns would import what this program imports, Megatron, for each rank.
    program = sys.modules["__main__"]
    program.__spec__ = program.__file__ = None


def forget_models() -> None:
    """Reset what megatron-core keeps in the process after a model was built.

    These are NVTE_* variables of `attention_backend`, the tracker of balancing losses, and the scale of gradients.
    """
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
    if "megatron.core.transformer.moe.moe_logging" in sys.modules:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        destroy_moe_metrics_tracker()
        MoEAuxLossAutoScaler.main_loss_backward_scale = None


def leave_groups() -> None:
    """Destroy all process groups except the default one. A collective call.

    A gloo group has three threads that poll a hundred times per second, and a model has dozens of groups.
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
    """Return the objects of all ranks, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def largest(errors: dict[str, float]) -> dict[str, float]:
    """Return the largest value over all ranks for each name."""
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(errors, values.tolist(), strict=True))


def leave(found: Any, output: str | Path) -> None:
    """Save the result of the first rank and leave the process group."""
    if dist.get_rank() == 0:
        torch.save(found, output)
    dist.barrier()
    dist.destroy_process_group()
