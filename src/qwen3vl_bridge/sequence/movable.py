"""Moving a dataclass of tensors between devices.

What lives here: the one mixin that does it. What may not: anything that knows what the tensors mean.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor


class Movable:
    """Moves every tensor of a dataclass, those of nested `Movable`s too."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """A copy with every tensor on `device`.

        Args:
            device: where to.
            non_blocking: let copies from pinned memory run behind the host's back, as `Tensor.to` does.
        """

        def move(value: Any) -> Any:
            if isinstance(value, Tensor | Movable):
                return value.to(device, non_blocking=non_blocking)
            return value

        assert is_dataclass(self)
        return replace(self, **{f.name: move(getattr(self, f.name)) for f in fields(self)})
