"""A linear layer under DoRA."""

from __future__ import annotations

import torch
from megatron.bridge.peft.dora_layers import DoRALinear
from torch import Tensor


class MagnitudeLinear(DoRALinear):
    """A linear layer under DoRA: rows of W + BA are scaled to learned norms, the bias is unchanged.

    Megatron-Bridge's own also scales the bias if the layer has added it, and expects inputs of three dimensions.
    """

    def _get_weight_norm(self) -> Tensor:
        with torch.no_grad():
            return super()._get_weight_norm()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., in] -> [..., out], and the bias if the layer leaves adding it to the caller."""
        output, bias_to_add, normed = self.base_linear_forward(x)
        if not self._adapter_enabled:
            return output, bias_to_add
        bias = getattr(self.to_wrap, "bias", None)
        added = bias if bias_to_add is None and bias is not None and bias.numel() else None
        product = output if added is None else output - added
        length = self.adapter.get_weight_magnitude() / self._get_weight_norm()
        scaled = length * (product + self.adapter(normed.contiguous()).view_as(product))
        return scaled if added is None else scaled + added, bias_to_add
