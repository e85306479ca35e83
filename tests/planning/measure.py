"""What autograd really keeps of a forward pass, and what a batch holds."""

from __future__ import annotations

from qwen3vl_bridge.planning.activations import Work
from qwen3vl_bridge.sequence import PackedBatch

import torch


def saved_bytes(model: torch.nn.Module, batch: PackedBatch) -> int:
    """Bytes of all tensors that a forward pass with a loss saves for backward, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # which keeps them alive, so that no address is used twice

    def pack(saved: object) -> object:
        if isinstance(saved, torch.Tensor):
            storage = saved.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(inputs=batch.local())
    return sum(storage.nbytes() for storage in storages.values())


def work_of(batch: PackedBatch) -> Work:
    """Tokens and patches of a batch; one without pictures has a blank one of four patches."""
    patches = 4 if batch.vision is None else len(batch.vision.pixel_values)
    return Work(batch.layout.total, patches, 0 if batch.vision is None else patches / 4)
