"""Gated residuals, or hyper connections: the residual of a layer consists of several streams.

A gated residual takes the place of the norm before a block (attention or experts). It mixes the streams to the block's
input, and computes how much of the block's output is added to each stream. megatron-core's layers accept such a norm,
which returns its output and the residual, and a function that replaces the addition (`inject`).

Source: transformers 5.20, Qwen4ExpTextGatedResidual.

Legend of shapes: s local tokens, b rows, n streams, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qwen3vl_bridge.models.qwen4_exp.ngram_embedding import GroupedRMSNorm

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Residual(NamedTuple):
    """The residual streams, and the factor of a block's output for each stream."""

    streams: Tensor  # [s, b, n * h]
    weights: Tensor  # [s, b, n], the factor of the output in each stream


class StreamMixer(nn.Module):
    """Mix the streams of the residual to one hidden state: the mean of the normalized streams, each times a gate.

    The gates come from all streams through a projection of low rank.
    """

    def __init__(self, config: TransformerConfig, *, injects: bool = False) -> None:
        super().__init__()
        self.streams = config.hc_count
        width, dtype = self.streams * config.hidden_size, config.params_dtype
        self.hc_norm = GroupedRMSNorm(config)
        self.input_mix_weight_down = nn.Linear(width, config.hc_lowrank, bias=False, dtype=dtype)
        self.input_mix_weight_up = nn.Linear(config.hc_lowrank, width, bias=False, dtype=dtype)
        if injects:
            self.block_inject_weight = nn.Linear(width, self.streams, bias=False, dtype=dtype)
        initialize_replicated(self, config)

    def forward(self, streams: Tensor) -> Tensor:
        """Mix streams [s, b, n * h] to [s, b, h]."""
        return self.mix(self.hc_norm(streams))

    def mix(self, normed: Tensor) -> Tensor:
        """Mix normalized streams [s, b, n * h] to [s, b, h]."""
        low = F.silu(self.input_mix_weight_down(normed) / self.streams)
        gated = torch.sigmoid(self.input_mix_weight_up(low)) * normed
        return gated.unflatten(-1, (self.streams, -1)).mean(-2)


class GatedResidual(StreamMixer):
    """The module in place of the norm before a block: returns the block's input and the `Residual`.

    In training only the streams are kept for the backward pass, which computes the rest again.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, injects=True)

    def forward(self, streams: Tensor) -> tuple[Tensor, Residual]:
        """Return the block's input [s, b, h] from streams [s, b, n * h], and the `Residual` for the block's output."""
        if torch.is_grad_enabled():
            mixed, weights = checkpoint(self._gate, streams, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed, weights = self._gate(streams)
        return mixed, Residual(streams, weights)

    def _gate(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hc_norm(streams)
        return self.mix(normed), 2 * torch.sigmoid(self.block_inject_weight(normed) / self.streams)


def inject(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Residual, float], Tensor]:
    """Return the function that adds a block's output to the streams, in place of `get_bias_dropout_add`."""
    return _add_to_streams


def _add_to_streams(output: tuple[Tensor, Tensor | None], residual: Residual, dropout: float) -> Tensor:
    """Return streams [s, b, n * h] plus a block's output [s, b, h], which is multiplied by a weight for each stream."""
    added = output[0].unsqueeze(-2) * residual.weights.unsqueeze(-1)
    return residual.streams + added.flatten(-2)


def initialize_replicated(module: nn.Module, config: TransformerConfig) -> None:
    """Initialize the linear layers of a module that every tensor-parallel rank has in full.

    Its parameters are marked, so that their gradients are summed over ranks that hold different tokens.
    """
    for child in module.children():
        if isinstance(child, nn.Linear) and config.perform_initialization:
            config.init_method(child.weight)
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel
