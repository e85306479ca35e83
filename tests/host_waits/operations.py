"""Operations of torch that make the host wait, by their names and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_")
# Operations whose result has a size that the host learns from the GPU.
_SIZED_BY_VALUES = {
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "is_nonzero",
}


def storage(tensor: Tensor) -> int | None:
    """The address of a tensor's memory, which views share."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # subclasses without one
        return None


def waits_for(
    name: str, args: tuple, kwargs: dict[str, Any], is_on_gpu: Callable[[Any], bool], *, copies: bool
) -> str | None:
    """What the host waits for in an operation one of whose tensors is on the GPU; None: for nothing."""
    if name in _SIZED_BY_VALUES:
        return name
    if name == "equal":
        first, second = args  # torch says at once what needs no look
        same = storage(first) == storage(second) and first.storage_offset() == second.storage_offset()
        return None if first.shape != second.shape or (same and first.stride() == second.stride()) else name
    if name == "_local_scalar_dense":
        return "a value"
    if name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 2:
        return "repeat_interleave without output_size"
    if name == "copy_":
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        apart = is_on_gpu(args[0]) != is_on_gpu(args[1])
        return "copy_ between host and GPU" if copies and blocking and apart and args[1].dim() else None
    return _of_index(name, args, is_on_gpu) if name in INDEXING else None


def _of_index(name: str, args: tuple, is_on_gpu: Callable[[Any], bool]) -> str | None:
    indices = [one for one in args[1] if one is not None]
    booleans = [one for one in indices if one.dtype in (torch.bool, torch.uint8)]
    fills = name != "index" and len(indices) == 1 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
    if booleans and not fills:  # which is a masked_fill
        return "booleans as an index"
    if any(one.dim() and not is_on_gpu(one) for one in indices):
        return "an index on the host"
    return None
