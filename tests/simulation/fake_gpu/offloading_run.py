"""Simulate a recipe and compare saved tensors with what the backward pass gets: `offloading_run.py RECIPE
SETTING=VALUE...`.

Copies between host and fake GPU are real. Results of kernels are replaced by random bytes before they are saved.
"""

import ctypes
import os
import sys
from collections import Counter
from pathlib import Path

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.simulation.one_rank import simulate_rank

import torch
from qwen3vl_recipes import registry
from qwen3vl_recipes.overrides import apply
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.simulation.fake_gpu.conftest import leave

SHORT = ["model.num_layers=4", "dataset.seq_length=1024", "model.seq_length=1024"]
counts: Counter[str] = Counter()
hook = saved_tensors_hooks.__init__


def hook_and_compare(hooks, pack, unpack):
    """Wrap saved-tensor hooks: compare the bytes before packing and after unpacking."""

    def packed(tensor):
        followed = tensor.is_cuda and tensor.is_contiguous() and type(tensor) is Tensor and tensor.is_floating_point()
        if followed and tensor.numel() > 1024 and not bytes_of(tensor).any():
            fill(tensor)
        return tensor.data_ptr(), bytes_of(tensor) if followed else None, pack(tensor)

    def unpacked(state):
        address, saved, inner = state
        tensor = unpack(inner)
        if saved is not None and tensor.data_ptr() != address:
            counts["moved"] += 1
            counts["known"] += saved.any().item()
            counts["different"] += not torch.equal(bytes_of(tensor), saved)
        return tensor

    hook(hooks, packed, unpacked)


def fill(tensor):
    """Fill a tensor with random bytes, without torch: it forbids hooks to change tensors."""
    random = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8)
    places = (ctypes.c_void_p(each.data_ptr()) for each in (tensor, random))
    ctypes.CDLL(None).cudaMemcpy(*places, ctypes.c_size_t(tensor.nbytes), 1)  # cudaMemcpyHostToDevice


def bytes_of(tensor):
    return tensor.detach().cpu().view(-1).view(torch.uint8)


if __name__ == "__main__":
    recipe, *settings = sys.argv[1:]
    saved_tensors_hooks.__init__ = hook_and_compare
    found = registry.find(recipe)
    cfg = apply(found(), [*SHORT, *settings])
    seen = simulate_rank(cfg, rank=0, world=found.gpus, log=Path(os.environ["FAKE_GPU_LOG"]))
    copies = {name: amount for name, (_, amount) in seen.launches.items() if "host" in name}
    leave(dict(counts=counts, copies=copies, peak=seen.peak, error=seen.error))
