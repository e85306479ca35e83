"""Compute gradient norms without waiting for the GPU if Transformer Engine and Apex are not installed.

Replaced if neither is installed: `l2_norm_impl` in `megatron.core.optimizer.clip_grads`. megatron-core's own function
reads the norm of each gradient on the host, so the host waits once per parameter in each step. Delete this module when
that function stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from qwen3vl_bridge.upstream.replacements import When, replace

import torch
from torch import Tensor


def l2_norm(
    chunk: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], per_tensor: bool, *_: Any
) -> tuple[Tensor, None]:
    """Return the L2 norm of all tensors as one vector, with the arguments of Apex' `amp_C.multi_tensor_l2norm`.

    The norm stays on the device. `chunk`, `overflow` and `per_tensor` are ignored.

    Returns:
        The norm, a float32 tensor [1], and None.
    """
    (only,) = tensors
    return torch.nn.utils.get_total_norm(only).float().reshape(1), None


def stay_on_device(clip_grads: ModuleType) -> None:
    """Make `megatron.core.optimizer.clip_grads` use `l2_norm` instead of megatron-core's own function.

    A fused function is not replaced.
    """
    if clip_grads.l2_norm_impl.__module__ == "megatron.core.utils":
        replace(clip_grads, "l2_norm_impl", l2_norm, When.NO_TRANSFORMER_ENGINE)
