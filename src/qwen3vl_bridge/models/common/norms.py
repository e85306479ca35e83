"""Norms without Transformer Engine: torch's, with megatron-core's constructor.

What lives here: their classes, and the choice of one by a configuration. What may not: where they are used
(`layer_specs.py`).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def _with_config(base: type[nn.Module]) -> type[nn.Module]:
    class Norm(base):
        """torch's norm with megatron-core's constructor; its gradients are reduced under sequence parallelism."""

        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
            for parameter in self.parameters():
                parameter.sequence_parallel = config.sequence_parallel

    Norm.__name__ = Norm.__qualname__ = base.__name__
    return Norm


RMSNorm = _with_config(nn.RMSNorm)
LayerNorm = _with_config(nn.LayerNorm)


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm times 1 + weight, in float32. Source: transformers, Qwen3_5RMSNorm."""

    def reset_parameters(self) -> None:
        """Initialise for a factor of one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


def rms_norm_of(config: TransformerConfig) -> type[nn.Module]:
    """The norm class for a configuration."""
    return ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm
