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
    """Return a context manager in which scaled_dot_product_attention on a GPU does not use cuDNN's kernel.

    torch prefers this kernel in 16 bits on an H100. cuDNN makes a plan for each shape, but segments have new lengths in
    each batch, and keys have a new length for each generated token.
    """
    return sdpa_kernel([kernel for kernel, is_on in _KERNELS.items() if is_on()])
