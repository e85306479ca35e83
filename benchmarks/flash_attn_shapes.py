"""Replace flash-attn 2 on the fake GPU by functions that allocate the same tensors and run no kernels.

Source: flash-attn 2.8.3, `FlashAttnFunc` and `FlashAttnVarlenFunc` of flash_attn/flash_attn_interface.py; `mha_bwd`
and `mha_varlen_bwd` of csrc/flash_attn/flash_api.cpp.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.3"


def provide(folder: Path) -> str:
    """Write a package flash_attn to a folder, unless flash-attn is installed. Return the folder, for PYTHONPATH."""
    try:
        importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        (package := folder / "flash_attn").mkdir()
        (package / "__init__.py").touch()
        (package / "flash_attn_interface.py").write_text(Path(__file__).read_text())
        (folder / "flash_attn_2_cuda.py").write_text("varlen_bwd = None  # Transformer Engine imports it\n")
        (known := folder / f"flash_attn-{VERSION}.dist-info").mkdir()
        (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n")
    return str(folder)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = torch.empty_like(query)
        # A packed row has shape [tokens, heads, width], padded rows have shape [rows, tokens, heads, width].
        sums = query.new_empty((*query.shape[:-3], query.size(-2), query.size(-3)), dtype=torch.float32)
        state = torch.empty(2, dtype=torch.int64, device=query.device)
        ctx.save_for_backward(query, key, value, result, sums, state)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, sums, _ = ctx.saved_tensors
        _workspace = (
            torch.empty_like(query, dtype=torch.float32), torch.empty_like(sums),
            # With grouped queries, gradients of keys and values are computed per query head and then summed.
            *(torch.empty_like(query) for _ in range(2) if key.size(-2) < query.size(-2)),
        )  # fmt: skip
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def flash_attn_func(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replace `flash_attn_func`, for padded rows [rows, tokens, heads, width] in 16 bits."""
    return _Attention.apply(query, key, value)


def flash_attn_varlen_func(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replace `flash_attn_varlen_func`, for packed rows [tokens, heads, width] in 16 bits."""
    return _Attention.apply(query, key, value)


# Transformer Engine imports these names, and calls them only under context parallelism.
_flash_attn_forward = _flash_attn_backward = _flash_attn_varlen_forward = _flash_attn_varlen_backward = None
