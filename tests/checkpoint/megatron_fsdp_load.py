"""On two ranks, megatron-core's own MegatronFSDP loads a checkpoint through Megatron-Bridge's own function.

    python megatron_fsdp_load.py HF_FOLDER MEGATRON_FOLDER TP...

It is loaded strictly, and then every local shard is compared with the checkpoint, bit for bit. The checkpoint has to
have the local layer spec's names, which the model has on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
import types

import qwen3vl_bridge  # noqa: F401

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.training import checkpointing
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

_WORLD = 2


def without_cuda() -> None:
    """Megatron-FSDP asks for two things by their CUDA names that the package has no need to redirect."""
    mesh, found = mcore_fsdp_adapter.DeviceMesh, megatron_fsdp.torch

    class CpuMesh:
        @staticmethod
        def from_group(groups, device_type=None, **kwargs):
            return mesh.from_group(groups, device_type="cpu", **kwargs)

    class Cuda:
        current_device = staticmethod(lambda: 0)

        def __getattr__(self, name):
            return getattr(found.cuda, name)

    class Torch:
        cuda, device = Cuda(), torch.device

        def __getattr__(self, name):
            return getattr(found, name)

    mcore_fsdp_adapter.DeviceMesh, megatron_fsdp.torch = CpuMesh, Torch()


def wrapped_model(hf_folder: str, tp: int) -> torch.nn.Module:
    """The model in MegatronFSDP, all its weights 7."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(0)
    provider = AutoBridge.from_hf_pretrained(hf_folder).to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size, provider.bf16, provider.params_dtype = tp, True, torch.bfloat16
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    inner = Float16Module(provider, provider.provide())
    wrapper = mcore_fsdp_adapter.FullyShardedDataParallel(provider, ddp, inner, device=torch.device("cpu"))
    model = unwrap_model([wrapper])[0]
    for parameter in model.parameters():
        parameter.data.fill_(7)
    return model


def load(model: torch.nn.Module, folder: str) -> None:
    """Fill the model, strictly."""
    state = {"checkpoint_version": 3.0, "iteration": 1, "model": model.state_dict_for_save_checkpoint()}
    strict = types.SimpleNamespace(strict_fsdp_dtensor_load=True)
    state, *_ = checkpointing.load_fsdp_dtensor_checkpoint(
        folder, strict, rank0=False, sharded_state_dict=state | {"_model": [model]}, iteration=0
    )
    checkpointing._load_model_state_dict(model, state["model"], True)


def compare(model: torch.nn.Module, stored: dict[str, torch.Tensor], tp: int) -> int:
    """Compare every shard with its part of what is stored; returns how many there are."""
    compared = 0
    for name, parameter in model.state_dict().items():
        if not hasattr(parameter, "to_local"):
            continue
        if name in stored:
            whole = stored[name]
        else:  # each tensor-parallel rank has its part of the gate above its part of the up projection
            halves = (stored[name + suffix].chunk(tp) for suffix in ("_w", "_v"))
            whole = torch.cat([part for pair in zip(*halves, strict=True) for part in pair])
        box = gather_and_compute_chunk_metadata(parameter)
        part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        if parameter.shape != whole.shape or not torch.equal(parameter.to_local(), part):
            raise AssertionError(f"{name}: {parameter} is not {part}")
        compared += 1
    return compared


def rank_main(rank: int, store: str, hf_folder: str, folder: str, *sizes: str) -> None:
    """Load at each tensor-parallel size."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=_WORLD)
    without_cuda()
    stored = _load_state_dict_from_keys(None, checkpoint_id=f"{folder}/iter_0000000")["model"]
    for tp in map(int, sizes):
        model = wrapped_model(hf_folder, tp)
        load(model, folder)
        # One write with its newline in it: print makes two where output is unbuffered, and two ranks then mix lines.
        sys.stdout.write(f"same: {compare(model, stored, tp)} of {len(stored)} at tp {tp}\n")
        sys.stdout.flush()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked, so that Megatron, which takes long to import, is imported once.
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.start_processes(
            rank_main, (f"{scratch}/store", *sys.argv[1:]), nprocs=_WORLD, start_method="fork"
        )
