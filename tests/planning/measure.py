"""What really is kept and held: by autograd, in gradient buffers, by an optimizer."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.models.flops import CHUNK
from qwen3vl_bridge.planning.activations import MicrobatchWork

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.utils import unwrap_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@contextmanager
def keeping(model: Sequence[nn.Module]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Storages of all tensors that are saved for a backward pass meanwhile, each once, those of weights left out."""
    weights = {p.untyped_storage().data_ptr() for chunk in model for p in chunk.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no address is used twice

    def pack(saved: object) -> object:
        if isinstance(saved, torch.Tensor):
            storage = saved.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
            return saved.detach()  # an operation that kept its own result would keep itself, and all before it
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield storages


@contextmanager
def allocated() -> Iterator[list[int]]:
    held: list[int] = []
    alive: dict[int, int] = {}

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = _storages((args, kwargs))
            made = function(*args, **(kwargs or {}))
            for address, storage in _storages(made).items():
                if address not in before and address not in alive:
                    alive[address] = storage.nbytes()
                    weakref.finalize(storage, alive.pop, address, None)
            held.append(sum(alive.values()))
            return made

    with Operations():
        yield held


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    found = [one.untyped_storage() for one in tree_iter(values) if isinstance(one, torch.Tensor)]
    return {one._cdata: one for one in found}


def saved_bytes(model: nn.Module, batch: PackedBatch, *, predicts: bool = False) -> int:
    with keeping([model]) as storages:
        model(inputs=batch.local(predicts=predicts))
    return sum(storage.nbytes() for storage in storages.values())


def work_of(batch: PackedBatch) -> MicrobatchWork:
    patches = 4 if batch.vision is None else len(batch.vision.pixel_values)
    return MicrobatchWork(batch.layout.total, patches, 0 if batch.vision is None else patches / 4, slots_of(batch))


def slots_of(batch: PackedBatch) -> float:
    """Slots of the delta rule's chunks in torch, for each token: so many chunks for each row, one more for a segment.

    A row that is not packed is a segment.
    """
    layout = batch.layout
    rows = 1 if layout.packed else len(layout.padded_lengths)
    tokens = layout.total // rows
    segments = len(layout.padded_lengths) // rows
    return CHUNK * (tokens // CHUNK + segments) / tokens


def gradient_bytes(model: Sequence[Any]) -> int:
    buffers = [buffer for chunk in model for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    return sum(buffer.numel_unpadded * buffer.grad_data.element_size() for buffer in buffers)


def optimizer_bytes(optimizer: Any) -> int:
    total = 0
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            copies = [p for group in getattr(one, name, None) or [] for p in group if p is not None]
            total += sum(p.numel() * p.element_size() for p in copies)
        for state in one.optimizer.state.values():
            moments = [state["exp_avg"], state["exp_avg_sq"]]
            total += sum(moment.numel() * moment.element_size() for moment in moments)
    return total


def described_bytes(model: Sequence[Any], optimizer: Any, kind: str) -> int:
    """Of what an optimizer makes to describe its tensors for a checkpoint, and not of what it has anyway."""
    weights = unwrap_model(model)[0].sharded_state_dict()
    own = {tensor.untyped_storage().data_ptr() for tensor in _tensors(optimizer)}
    described = optimizer.sharded_state_dict(weights, metadata={"distrib_optim_sharding_type": kind})
    tensors = [entry.data for entry in nested_values(described) if isinstance(entry, ShardedBase)]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in own}.values())


def _tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, state in one.optimizer.state.items():
            yield from (parameter, *(value for value in state.values() if isinstance(value, torch.Tensor)))
        for buffer in one.buffers:
            yield from (part for part in (buffer.param_data, buffer.grad_data) if part is not None)
