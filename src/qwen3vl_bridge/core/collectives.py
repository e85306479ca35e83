"""All collectives that our code calls in training. Groups of one rank do not communicate.

Converters have their own processes, see `checkpoint/formats/output_files.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from qwen3vl_bridge.core.files import CheckpointError

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException


def scatter_sequence(hidden: Tensor, config: TransformerConfig, groups: ProcessGroupCollection) -> Tensor:
    """Return this rank's slice [s / tp, b, h] of `hidden` [s, b, h] under sequence parallelism, else `hidden`."""
    if not config.sequence_parallel:
        return hidden
    return tensor_parallel.scatter_to_sequence_parallel_region(hidden, group=groups.tp)


def gather_sequence(hidden: Tensor, config: TransformerConfig, groups: ProcessGroupCollection) -> Tensor:
    """Gather hidden states [s / tp, b, h] of sequence-parallel ranks to [s, b, h]; inverts `scatter_sequence`."""
    if not config.sequence_parallel:
        return hidden
    return tensor_parallel.gather_from_sequence_parallel_region(hidden, group=groups.tp)


def sum_in_group(counts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Return the elementwise sum of `counts` over the ranks of a group, as a new tensor."""
    counts = counts.clone()
    _all_reduce(counts, group)
    return counts


def sum_own_parts(parts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Return the elementwise sum of `parts` over the ranks of a group. Its gradient is passed on to `parts` unchanged.

    If all ranks compute the same function of the sum, each rank gets the gradient of its own `parts`.
    """
    return tensor_parallel.reduce_from_tensor_model_parallel_region(parts.clone(), group=group)


def sum_gradients(values: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Return `values`, which all ranks of a group have; the backward pass sums their gradients over the ranks."""
    return tensor_parallel.copy_to_tensor_model_parallel_region(values, group=group)


def max_in_group(values: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Return the elementwise maximum of `values` over the ranks of a group, as a new tensor."""
    values = values.clone()
    _all_reduce(values, group, torch.distributed.ReduceOp.MAX)
    return values


def sum_over_data_parallel(amounts: Sequence[int], groups: ProcessGroupCollection) -> list[int]:
    """Return the elementwise sums of `amounts` over data-parallel ranks, as Python integers on all ranks."""
    first = groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0
    values = torch.tensor(amounts, device=device_of_collectives())
    return sum_over_ranks(values if first else torch.zeros_like(values)).tolist()


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the elementwise maximum of `values` over all ranks."""
    maxima = torch.tensor(values, dtype=torch.float64, device=device_of_collectives())
    _all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)
    return maxima.tolist()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the elementwise sum of `values` over all ranks, bit-identical on each, on `device_of_collectives`."""
    values = values.to(device_of_collectives(), copy=True)
    _all_reduce(values)
    return values


def sum_number_over_ranks(value: Tensor | float) -> Tensor:
    """Return the sum of a number over all ranks, as a float64 scalar tensor on `device_of_collectives`."""
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=torch.float64, device=device_of_collectives())
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
    """Return whether a group (default: all processes) has only one rank."""
    return torch.distributed.get_world_size(group) == 1


def device_of_collectives() -> torch.device:
    """Return the device on which collectives over all processes expect tensors."""
    # "fake" is torch's backend for processes that do not exist. It accepts tensors on any device.
    backend = torch.distributed.get_backend()
    on_gpu = backend == "nccl" or (backend == "fake" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def broadcast_number(value: Tensor, rank: int) -> Tensor:
    """Send the scalar `value` of global rank `rank` to all ranks. Return a new tensor on `device_of_collectives`."""
    value = value.to(device_of_collectives(), copy=True)
    _broadcast(value, rank)
    return value


def broadcast_in_group(values: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Send the `values` of a group's first rank to all ranks of the group. Return them as a new tensor."""
    return broadcast_from_rank(values.clone(), 0, group)


def broadcast_from_rank(values: Tensor, rank: int, group: torch.distributed.ProcessGroup) -> Tensor:
    """Overwrite `values` on all ranks of a group with the values of rank `rank` of the group, and return them.

    All ranks must pass contiguous tensors with the same shape and dtype.
    """
    _broadcast(values, torch.distributed.get_global_rank(group, rank), group)
    return values


def barrier() -> None:
    """Wait until all processes have called this function."""
    if not _alone():
        torch.distributed.barrier()


def broadcast_object[Value](value: Value, rank: int = 0) -> Value:
    """Send a picklable object from process `rank` to all processes, and return it."""
    if _alone():
        return value
    objects = [value]
    torch.distributed.broadcast_object_list(objects, src=rank)
    return objects[0]


def gather_objects[Value](value: Value, group: torch.distributed.ProcessGroup | None = None) -> list[Value]:
    """Gather a picklable object from each rank of a group (default: all processes). Return a list ordered by rank."""
    if _alone(group):
        return [value]
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, value, group=group)
    return gathered


def is_rank_zero() -> bool:
    """Return whether this process is rank 0."""
    return torch.distributed.get_rank() == 0


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Context manager that raises CheckpointError in all processes if its `with` block raises in one of them.

    Use it for work that may fail in a single process, for example on a full disk: other processes would wait for the
    failed one forever. Leaving the block is a collective call. If the block calls collectives, no process may fail
    between them.
    """
    problem: Exception | None = None
    try:
        yield
    except CheckpointException as error:  # torch raises it on all processes; it is not an Exception
        problem = error_of_all_ranks(error)
        problem.__cause__ = error
    except Exception as error:
        problem = error
    gathered = gather_objects(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    if failed := [f"rank {rank}: {message}" for rank, message in enumerate(gathered) if message is not None]:
        raise CheckpointError("; ".join(failed))


def error_of_all_ranks(error: CheckpointException) -> CheckpointError:
    """Convert a failure of torch's distributed checkpointing to a CheckpointError that lists each failed rank."""
    return CheckpointError("; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()))


def sum_gradients_over_sequence(features: Tensor, config: TransformerConfig, groups: ProcessGroupCollection) -> Tensor:
    """Return `features`; the backward pass sums their gradient over sequence-parallel ranks.

    Under sequence parallelism each rank uses the features of its own tokens, so its gradient is only a part of the sum.
    """
    if not config.sequence_parallel:
        return features
    return sum_gradients(features, groups.tp)


def gather_in_group(local: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Gather tensors [s, ...] of all ranks of a group to [ranks, s, ...].

    The backward pass sums the gradient of each rank's tensor over all ranks.
    """
    return tensor_parallel.gather_from_sequence_parallel_region(local, group=group).view(group.size(), *local.shape)


@torch.no_grad()
def gather_stacked(local: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Gather a tensor [s, ...] of each rank to [ranks, s, ...], ordered by rank, without gradients.

    All ranks must pass tensors with the same shape and dtype, on a device that the group's backend supports.
    """
    if _alone(group):
        return local[None]
    stacked = local.new_empty(group.size() * len(local), *local.shape[1:])  # gloo accepts no other shape
    torch.distributed.all_gather_into_tensor(stacked, local.contiguous(), group=group)
    return stacked.view(group.size(), *local.shape)


def exchange_parts(parts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Send part i of `parts` [ranks, ...] to rank i of a group. Return the received parts, ordered by sending rank.

    The backward pass sends gradients back. All ranks must pass tensors with the same shape and dtype.
    """
    return tensor_parallel.all_to_all(group, parts)


def tokens_to_channels(tokens: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Convert this rank's n tokens with all channels, [n, h], to the tokens of all ranks with some of the channels.

    Returns:
        [ranks * n, h / ranks], ordered by the rank that tokens come from. Rank i gets the i-th part of the channels.
    """
    return tensor_parallel.all_to_all_sp2hp(tokens, group=group)


def channels_to_tokens(channels: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Undo `tokens_to_channels`: return this rank's tokens [n, h] with all channels."""
    return tensor_parallel.all_to_all_hp2sp(channels, group=group)


def chunks_to_lanes(chunks: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Convert this rank's two chunks with all lanes to the chunks of all ranks with some of the lanes.

    A lane is an index along which computation is independent, such as a channel or an attention head of a segment.

    Args:
        chunks: [2, lanes, ...], chunks r and 2 * cp - 1 - r of rank r (see `token_index`).

    Returns:
        [2 * cp, lanes of this rank, ...], in the order of chunks. The numbers of lanes of two ranks differ by at most
        one.
    """
    ranks, sent = group.size(), _split_evenly(chunks.size(1), group)
    received = [sent[group.rank()]] * ranks
    gathered = tensor_parallel.all_to_all(group, chunks.transpose(0, 1).contiguous(), received, sent)
    first, second = gathered.unflatten(0, (ranks, received[0])).unbind(2)
    return torch.cat((first, second.flip(0)))


def lanes_to_chunks(lanes: Tensor, count: int, group: torch.distributed.ProcessGroup) -> Tensor:
    """Undo `chunks_to_lanes`: return this rank's two chunks with all `count` lanes, [2, count, ...]."""
    received = _split_evenly(count, group)
    first, second = lanes.chunk(2)
    held = torch.stack((first, second.flip(0)), 2).flatten(0, 1)  # [cp * lanes of this rank, 2, ...]
    return tensor_parallel.all_to_all(group, held, received, [lanes.size(1)] * group.size()).transpose(0, 1)


def _split_evenly(count: int, group: torch.distributed.ProcessGroup) -> list[int]:
    """Return the number of items of each rank if `count` items are divided over a group as evenly as possible."""
    each, rest = divmod(count, group.size())
    return [each + (rank < rest) for rank in range(group.size())]


def exchange_vision_tokens(
    tokens: Tensor,
    features: Tensor,
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    groups: ProcessGroupCollection,
) -> tuple[Tensor, Tensor]:
    """Exchange encoded vision tokens between context-parallel ranks, so that each rank has the tokens that it uses.

    The backward pass sums the gradients of a token over the ranks that received it.

    Args:
        tokens: [m, h], the m vision tokens that this rank has encoded. A rank without frames passes a blank image,
            which is not sent to any rank.
        features: [t, m, h], the features of these tokens from t DeepStack layers.
        rows: [sum(sent)] int64, indices of the tokens to send: first to rank 0, then to rank 1, ...
        sent, received: numbers of tokens sent to, and received from, each rank, including itself; on the host.

    Returns:
        The K = sum(received) tokens [K, h] and their features [t, K, h], ordered by sending rank.
    """
    selected = torch.cat((tokens[:, None], features.transpose(0, 1)), 1)[rows]
    exchanged = tensor_parallel.all_to_all(groups.cp, selected, list(received), list(sent))
    return exchanged[:, 0], exchanged[:, 1:].transpose(0, 1)


def gather_logits(logits: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Gather logits [..., padded vocabulary / tp] over tensor-parallel ranks to [..., padded vocabulary]."""
    return tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=groups.tp)
