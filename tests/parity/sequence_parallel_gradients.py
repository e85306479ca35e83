"""Run by torchrun on two ranks: gradients of whole vision parameters under tensor and sequence parallelism.

torchrun --nproc_per_node 2 -m tests.parity.sequence_parallel_gradients HF_FOLDER OUTPUT
"""

import sys

from qwen3vl_bridge.logs import quiet
from qwen3vl_bridge.parallel import sequence_ranks

import torch

from .batches import make_batch, make_samples
from .conftest import make_pair


def gradients(folder: str, **fields) -> dict[str, torch.Tensor]:
    """Gradients of the parameters that every rank holds whole, by name."""
    pair = make_pair(folder, **fields)
    batch = make_batch(make_samples("mixed", pair.config, seed=7), pair.config, packed=True)
    inputs = batch.local(**sequence_ranks(pair.provider, pair.provider._pg_collection))
    (pair.megatron(inputs=inputs) * inputs.loss_mask).sum().backward()
    vision = pair.megatron.vision_model.named_parameters()
    return {name: p.grad for name, p in vision if not getattr(p, "tensor_model_parallel", False)}


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    found = gradients(sys.argv[1], tensor_model_parallel_size=2, sequence_parallel=True)
    if torch.distributed.get_rank() == 0:
        torch.save(found, sys.argv[2])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
