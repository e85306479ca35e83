"""Run by torchrun on two ranks: losses and gradients of whole parameters under tensor and sequence parallelism.

torchrun --nproc_per_node 2 -m tests.parity.sequence_parallel_gradients OUTPUT HF_FOLDER...
"""

import sys

from qwen3vl_bridge.logs import quiet
from qwen3vl_bridge.parallel import sequence_ranks

import torch

from .batches import make_batch, make_samples
from .conftest import make_pair

BATCHES = {("mixed", True): 7, ("mixed", False): 8, ("text only", True): 9, ("text only", False): 10}


def results(folder: str, **fields) -> dict[tuple[str, bool], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """For each content, packed and in rows: losses, and gradients of vision parameters that every rank has whole.

    Without a balancing loss: megatron-core weighs a rank's part of it by the rank's own number of real tokens, which
    is not the same on all of them.
    """
    pair, found = make_pair(folder, moe_aux_loss_coeff=0.0, **fields), {}
    for (content, packed), seed in BATCHES.items():
        pair.zero_grad()
        samples = make_samples(content, pair.config, seed)
        layout = None if packed else rows_of_even_length(samples)
        batch = make_batch(samples, pair.config, packed=packed, layout=layout)
        inputs = batch.local(**sequence_ranks(pair.provider, pair.provider._pg_collection))
        losses = pair.megatron(inputs=inputs)
        (losses * inputs.loss_mask).sum().backward()
        vision = pair.megatron.vision_model.named_parameters()
        whole = {name: p.grad.clone() for name, p in vision if not getattr(p, "tensor_model_parallel", False)}
        found[content, packed] = losses.detach() * inputs.loss_mask, whole
    return found


def rows_of_even_length(samples):
    """Rows that sequence parallelism over two ranks can halve."""
    from qwen3vl_bridge.sequence import SequenceLayout

    lengths = [len(s.ids) for s in samples]
    return SequenceLayout.rows(lengths, max(lengths) // 2 * 2 + 4)


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    output, *folders = sys.argv[1:]
    found = [results(folder, tensor_model_parallel_size=2, sequence_parallel=True) for folder in folders]
    if torch.distributed.get_rank() == 0:
        torch.save(found, output)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
