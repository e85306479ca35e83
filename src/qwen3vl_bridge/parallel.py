"""The only module with collectives of ours.

What lives here: how hidden states are scattered and gathered, how figures of all ranks are added up. What may not:
which tokens a rank holds (`sequence/layout.py`), modules.
"""

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def scatter_sequence(hidden: Tensor, config: TransformerConfig, groups: ProcessGroupCollection) -> Tensor:
    """[s, b, h] -> this rank's [s / tp, b, h] under sequence parallelism, the whole of it otherwise."""
    if not config.sequence_parallel:
        return hidden
    return tensor_parallel.scatter_to_sequence_parallel_region(hidden, group=groups.tp)


def sequence_ranks(config: TransformerConfig, groups: ProcessGroupCollection) -> dict[str, int]:
    """The ranks that choose which tokens are local, as `PackedBatch.local` takes them."""
    return dict(
        cp_size=groups.cp.size(),
        cp_rank=groups.cp.rank(),
        sp_size=groups.tp.size() if config.sequence_parallel else 1,
        sp_rank=groups.tp.rank() if config.sequence_parallel else 0,
    )


def sum_over_data_parallel(values: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Add up `values` of all ranks that see different tokens, in place."""
    torch.distributed.all_reduce(values, group=groups.dp_cp)
    return values


def wait_for_all() -> None:
    """Return when every process is here."""
    torch.distributed.barrier()


def sum_gradients_over_sequence(features: Tensor, config: TransformerConfig, groups: ProcessGroupCollection) -> Tensor:
    """`features` as they are; their gradient is the sum over the ranks that share a sequence.

    Under sequence parallelism each rank uses the rows of its own tokens, so its gradient is a part of the whole.
    """
    if not config.sequence_parallel:
        return features
    return tensor_parallel.copy_to_tensor_model_parallel_region(features, group=groups.tp)


def gather_over_context(local: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """[s, ...] of each context-parallel rank -> [cp, s, ...] of all; backward, each gets the sum of its gradients."""
    return tensor_parallel.gather_from_sequence_parallel_region(local, group=group).view(group.size(), *local.shape)


def gather_vocabulary(logits: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """[..., padded vocabulary / tp] logits of this rank -> those of all tensor-parallel ranks, side by side."""
    return tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=groups.tp)
