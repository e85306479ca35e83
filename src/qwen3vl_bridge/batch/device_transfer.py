"""Moving a dataclass of tensors between devices.

What lives here: the one mixin that does it. What may not: anything that knows what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable
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
        return self._each(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A copy with every tensor in page-locked memory, from which copies to a GPU run behind the host's back."""
        return self._each(lambda value: value.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> Self:
        assert is_dataclass(self)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: change(v) for n, v in values.items() if isinstance(v, Tensor | Movable)})
