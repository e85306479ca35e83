"""The only module that calls collectives in training (converters: `checkpoint/processes.py`). Groups of one rank do not
communicate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from qwen3vl_bridge.io.files import CheckpointError

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException


def scatter_sequence(hidden: Tensor, config: TransformerConfig, groups: ProcessGroupCollection) -> Tensor:
    """[s, b, h] -> this rank's [s / tp, b, h] under sequence parallelism, unchanged otherwise."""
    if not config.sequence_parallel:
        return hidden
    return tensor_parallel.scatter_to_sequence_parallel_region(hidden, group=groups.tp)


def sum_counts(counts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Sum of `counts` over a group, in a new tensor."""
    counts = counts.clone()
    _all_reduce(counts, group)
    return counts


def max_in_group(values: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Elementwise maximum of `values` over a group, in a new tensor."""
    values = values.clone()
    _all_reduce(values, group, torch.distributed.ReduceOp.MAX)
    return values


def sum_amounts(amounts: Sequence[int], groups: ProcessGroupCollection) -> list[int]:
    """Sum of host integers over the ranks that read different batches (data-parallel ranks)."""
    first = groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0
    values = torch.tensor(amounts, device=_device_of_collectives())
    return sum_over_ranks(values if first else torch.zeros_like(values)).tolist()


def max_of_each(values: Sequence[float]) -> list[float]:
    """Elementwise maximum over all ranks."""
    maxima = torch.tensor(values, dtype=torch.float64, device=_device_of_collectives())
    _all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)
    return maxima.tolist()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum of `values` over all ranks, bit-identical on each, on the device of the collectives."""
    values = values.to(_device_of_collectives(), copy=True)
    _all_reduce(values)
    return values


def sum_numbers(value: Tensor | float) -> Tensor:
    """[] float64, sum over all ranks of a number from a tensor or the host; on the device of the collectives."""
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=torch.float64, device=_device_of_collectives())
    return sum_over_ranks(value.double())


def _all_reduce(
    values: Tensor, group: torch.distributed.ProcessGroup | None = None, op: Any = torch.distributed.ReduceOp.SUM
) -> None:
    if not _alone(group):
        torch.distributed.all_reduce(values, op=op, group=group)


def _broadcast(values: Tensor, rank: int, group: torch.distributed.ProcessGroup | None = None) -> None:
    if not _alone(group):
        torch.distributed.broadcast(values, src=rank, group=group)


def _alone(group: torch.distributed.ProcessGroup | None = None) -> bool:
    """Whether a group (default: all processes) has only one rank."""
    return torch.distributed.get_world_size(group) == 1


def _device_of_collectives() -> torch.device:
    on_gpu = torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def broadcast_number(value: Tensor, rank: int) -> Tensor:
    """A scalar tensor of one rank, broadcast to all, on the device of the collectives."""
    value = value.to(_device_of_collectives(), copy=True)
    _broadcast(value, rank)
    return value


def broadcast_in_group(values: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """`values` of a group's first rank, broadcast to the group, in a new tensor."""
    values = values.clone()
    _broadcast(values, torch.distributed.get_global_rank(group, 0), group)
    return values


def wait_for_all() -> None:
    """Barrier over all processes."""
    if not _alone():
        torch.distributed.barrier()


def broadcast_object[Value](value: Value, rank: int = 0) -> Value:
    """A picklable object of one process (default: the first), broadcast to all."""
    if _alone():
        return value
    objects = [value]
    torch.distributed.broadcast_object_list(objects, src=rank)
    return objects[0]


def gather_objects[Value](value: Value, group: torch.distributed.ProcessGroup | None = None) -> list[Value]:
    """Picklable objects of all processes (of a group, or of all), gathered on each, ordered by rank."""
    if _alone(group):
        return [value]
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, value, group=group)
    return gathered


def is_first() -> bool:
    """Whether this process does what only one has to do."""
    return torch.distributed.get_rank() == 0


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """If the body fails in one process, it fails in all; with the message of that process, as a CheckpointError.

    Between two collectives every process does things that may fail on only one: a full disk, a tensor that does not
    fit. If one raised and left, the others would wait for it. This ends with a collective, so every process has to
    reach its end, and no process may fail between collectives of the body itself.
    """
    problem: Exception | None = None
    try:
        yield
    except CheckpointException as error:  # torch's own way of failing together, which is not an Exception
        problem = joint_failure(error)
        problem.__cause__ = error
    except Exception as error:
        problem = error
    gathered = gather_objects(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    if failed := [f"rank {rank}: {message}" for rank, message in enumerate(gathered) if message is not None]:
        raise CheckpointError("; ".join(failed))


def joint_failure(error: CheckpointException) -> CheckpointError:
    """The messages of the processes that failed in torch's own way of failing together."""
    return CheckpointError("; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()))


def sum_gradients_over_sequence(features: Tensor, config: TransformerConfig, groups: ProcessGroupCollection) -> Tensor:
    """Identity; in the backward pass the gradient is summed over the ranks that share a sequence.

    Under sequence parallelism each rank uses the rows of its own tokens, so its gradient is only a part of the sum.
    """
    if not config.sequence_parallel:
        return features
    return tensor_parallel.copy_to_tensor_model_parallel_region(features, group=groups.tp)


def gather_over_context(local: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """[s, ...] of each context-parallel rank -> [cp, s, ...] of all; in the backward pass each gets the sum of its
    gradients.
    """
    return tensor_parallel.gather_from_sequence_parallel_region(local, group=group).view(group.size(), *local.shape)


@torch.no_grad()
def gather_stacked(local: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """[s, ...] numbers of each context-parallel rank -> [cp, s, ...] of all, ordered by rank; without gradients.

    Every rank of the group has to pass a tensor of the same shape and dtype, on the device of the group's backend.
    """
    if _alone(group):
        return local[None]
    stacked = local.new_empty(group.size() * len(local), *local.shape[1:])  # gloo accepts no other shape
    torch.distributed.all_gather_into_tensor(stacked, local.contiguous(), group=group)
    return stacked.view(group.size(), *local.shape)


def exchange_encoded(
    tokens: Tensor,
    features: Tensor,
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    groups: ProcessGroupCollection,
) -> tuple[Tensor, Tensor]:
    """Exchange encoded vision tokens between context-parallel ranks, so that each has the rows that its tokens use.

    The sizes are known on the host. The gradient of a row that is sent to several ranks is the sum of theirs.

    Args:
        tokens, features: [m, h] and [t, m, h] of the frames that this rank encodes; of a blank image, which is sent to
            no rank, if it encodes none.
        rows: [sum(sent)] int64, which of the m tokens go to the first rank, then to the second.
        sent, received: number of rows sent to, and received from, each rank, including itself.

    Returns:
        [K, h] and [t, K, h], concatenated by rank.
    """
    own = torch.cat((tokens[:, None], features.transpose(0, 1)), 1)[rows]
    exchanged = tensor_parallel.all_to_all(groups.cp, own, list(received), list(sent))
    return exchanged[:, 0], exchanged[:, 1:].transpose(0, 1)


def gather_vocabulary(logits: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """[..., padded vocabulary / tp] logits of this rank -> those of all tensor-parallel ranks, concatenated."""
    return tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=groups.tp)
