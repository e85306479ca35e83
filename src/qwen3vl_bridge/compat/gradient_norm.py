"""The norm of all gradients in plain PyTorch, for machines without Transformer Engine and Apex.

megatron-core's own function reads the norm of each gradient on the host, so a GPU is waited for once per parameter in
each step; this one stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def l2_norm(
    chunk: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], per_tensor: bool, *_: Any
) -> tuple[Tensor, None]:
    """The L2 norm of all tensors as one vector, with the arguments of Apex' `amp_C.multi_tensor_l2norm`.

    Args:
        chunk: ignored; the fused function's.
        overflow: likewise.
        tensors: one list of tensors on one device.
        per_tensor: ignored: norms of single tensors are not returned, as in megatron-core's own function.

    Returns:
        [1] float32 on the tensors' device, and None.
    """
    (only,) = tensors
    return torch.nn.utils.get_total_norm(only).float().reshape(1), None


def replace_in_clipping(module: Any) -> None:
    """`megatron.core.optimizer.clip_grads`: this norm instead of its own one, but not instead of a fused one."""
    if module.l2_norm_impl.__module__ == "megatron.core.utils":
        module.l2_norm_impl = l2_norm
