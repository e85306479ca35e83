"""Moving tensors between host and device.

What lives here: a mixin that moves a dataclass of tensors, and values on their way to the host. What may not: anything
that knows what the tensors mean.
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


class HostCopy:
    """Values on their way from a device to the host.

    The copy begins at once, and the host goes on. Who reads it waits until it is there, which takes no time once
    anything has waited for what was begun later.

    Args:
        values: on any device; they may change afterwards.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach().to("cpu", non_blocking=True, copy=True)  # in page-locked memory
        self._arrived = torch.cuda.Event() if values.device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def is_there(self) -> bool:
        """Whether reading would not wait."""
        return self._arrived is None or self._arrived.query()

    def tolist(self) -> list:
        """The values, as `Tensor.tolist`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
