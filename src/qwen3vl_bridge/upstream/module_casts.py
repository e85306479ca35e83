"""Parameters that keep their dtype when a torch module is cast.

Overridden: `torch.nn.Module._apply`, with which `half()`, `bfloat16()` and `to()` cast a module with all inner modules.
megatron-core casts a model with these methods, and torch has no way to exempt a parameter. Delete this module when
torch or megatron-core can exempt parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class KeepFloat32(nn.Module):
    """Mixin that keeps the parameters named in `float32_parameters` in float32 if the module is cast to 16 bits."""

    float32_parameters: tuple[str, ...] = ()

    def cast_to_float32(self) -> None:
        """Cast the parameters in `float32_parameters` to float32. Call this after they are created."""
        for name in self.float32_parameters:
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.float()

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> KeepFloat32:
        before = {name: self.get_parameter(name).data for name in self.float32_parameters}
        super()._apply(fn, *args, **kwargs)
        for name, data in before.items():
            parameter = self.get_parameter(name)
            if parameter.dtype.itemsize < data.dtype.itemsize:
                parameter.data = data.to(parameter.device)
        return self
