"""Adapters of parts of a layer, or of one expert each, in Hugging Face's format: only tensors.

CanonicalLoRA has an adapter for each of q, k and v, or gate and up. If these are rows of one tensor, their products are
one product of n times the rank: `linear_in` concatenated, `linear_out` block-diagonal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from megatron.bridge.models.conversion.peft_bridge import AdapterWeight
from torch import Tensor

# In the order of their rows in a Hugging Face tensor.
_ORDER = ("adapter_q", "adapter_k", "adapter_v", "adapter_gate", "adapter_up")


def join(adapters: Sequence[AdapterWeight]) -> AdapterWeight:
    """One adapter of all the rows that several have, with the scale that each has.

    Args:
        adapters: of q, k and v, or of gate and up: [dim, in] and [rows, dim], of one dim and alpha.

    Returns:
        [n * dim, in] and [all rows, n * dim], with n times the alpha.
    """
    first, *_ = ordered = sorted(adapters, key=lambda adapter: _ORDER.index(adapter.adapter_key))
    rows = torch.cat([adapter.linear_in_weight.weight for adapter in ordered], dim=-2)
    blocks = [adapter.linear_out_weight.weight for adapter in ordered]
    return dataclasses.replace(
        first,
        adapter_key=None,
        alpha=first.alpha * len(ordered),
        dim=first.dim * len(ordered),
        linear_in_weight=first.linear_in_weight._replace(weight=rows),
        linear_out_weight=first.linear_out_weight._replace(weight=torch.block_diag(*blocks)),
    )


def pack_experts(matrices: Mapping[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`peft`'s two matrices for all experts of a layer (source: peft 0.21, `ParamWrapper`).

    Args:
        matrices: [dim, in] and [out, dim] of each expert.

    Returns:
        [experts * dim, in], expert by expert, and [out, dim * experts], in which experts are the faster index.
    """
    inputs, outputs = zip(*(matrices[expert] for expert in sorted(matrices)), strict=True)
    return torch.cat(inputs), torch.stack(outputs, -1).flatten(1)
