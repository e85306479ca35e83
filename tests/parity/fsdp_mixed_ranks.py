"""Run by torchrun on two ranks: Megatron-FSDP with pictures on one rank and text alone on the other.

    torchrun --nproc_per_node 2 -m tests.parity.fsdp_mixed_ranks HF_FOLDER OUTPUT

Parameters lie in small buckets, so that each module's are gathered when it is called, and reduced on their own.
"""

import sys

from qwen3vl_bridge.logs import quiet
from qwen3vl_bridge.training.process_group import initialize

import torch
from megatron.bridge import AutoBridge
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from torch.distributed import DeviceMesh
from transformers import AutoConfig

from .batches import make_batch, make_samples

CONTENTS = ("one image", "text only")


class CPUMesh(DeviceMesh):
    """megatron-core asks for a mesh on CUDA, whatever there is."""

    @staticmethod
    def from_group(*args, **kwargs):
        return DeviceMesh.from_group(*args, **{**kwargs, "device_type": "cpu"})


def batch(folder: str, rank: int):
    """What a rank sees."""
    config = AutoConfig.from_pretrained(folder)
    return make_batch(make_samples(CONTENTS[rank], config, seed=11), config, packed=True).local()


def main(folder: str, output: str) -> None:
    """Two forward and backward passes; each rank saves its losses."""
    mcore_fsdp_adapter.DeviceMesh = CPUMesh
    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=True)
    provider.gradient_accumulation_fusion = False
    provider.finalize()
    groups = initialize(provider, seed=0)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        grad_reduce_in_fp32=True,
        gradient_reduce_div_fusion=False,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=20_000,
    )
    (model,) = provider.provide_distributed_model(
        ddp_config=ddp,
        use_megatron_fsdp=True,
        use_cpu_initialization=True,
        mixed_precision_wrapper=None,
        pg_collection=groups,
    )
    rank = torch.distributed.get_rank()
    inputs, losses = batch(folder, rank), []
    for _ in range(2):
        loss = (model(inputs=inputs) * inputs.loss_mask).sum()
        loss.backward()
        losses.append(loss.item())
    torch.save(losses, f"{output}.{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    main(*sys.argv[1:])
