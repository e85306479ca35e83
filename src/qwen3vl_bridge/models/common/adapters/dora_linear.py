"""A linear layer under DoRA.

What lives here: what Megatron-Bridge's own gets wrong for this model, put right. What may not: which layers it is on
(`peft/lora.py`).
"""

from __future__ import annotations

import torch
from megatron.bridge.peft.dora_layers import DoRALinear
from torch import Tensor


class MagnitudeLinear(DoRALinear):
    """A linear layer under DoRA: rows of W + BA brought to learned lengths, the bias left alone.

    Megatron-Bridge's own scales the bias too where the layer has added it, and expects inputs of three dimensions.
    """

    def _get_weight_norm(self) -> Tensor:
        with torch.no_grad():
            return super()._get_weight_norm()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., in] -> [..., out], and the bias where the layer leaves adding it to the caller."""
        output, bias_to_add, normed = self.base_linear_forward(x)
        if not self._adapter_enabled:
            return output, bias_to_add
        bias = getattr(self.to_wrap, "bias", None)
        added = bias if bias_to_add is None and bias is not None and bias.numel() else None
        product = output if added is None else output - added
        length = self.adapter.get_weight_magnitude() / self._get_weight_norm()
        scaled = length * (product + self.adapter(normed.contiguous()).view_as(product))
        return scaled if added is None else scaled + added, bias_to_add
