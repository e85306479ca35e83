"""The kernels that torch's scaled_dot_product_attention may use."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_KERNELS = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def allowed_kernels() -> contextlib.AbstractContextManager[object]:
    """Context manager that excludes cuDNN's kernel. For tensors on a GPU.

    torch prefers it in 16 bits on an H100. It makes a plan for each shape, but the lengths of segments change with each
    batch, and those of keys with each generated token.
    """
    return sdpa_kernel([kernel for kernel, is_on in _KERNELS.items() if is_on()])
