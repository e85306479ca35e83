"""Moving tensors between host and device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor


class Movable:
    """Moves every tensor of a dataclass, including those of nested `Movable`s."""

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on `device`, each moved by `sent`."""
        return self._each(lambda value: sent(value, device))

    def pin_memory(self) -> Self:
        """A copy with every tensor in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._each(lambda value: value.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> Self:
        """Tell the allocator that another stream than the one that created the tensors uses them; return them."""

        def record(value: Any) -> Any:
            value.record_stream(stream)
            return value

        return self._each(record)

    def _each(self, change: Callable[[Any], Any]) -> Self:
        assert is_dataclass(self)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: change(v) for n, v in values.items() if isinstance(v, Tensor | Movable)})


def sent[Value: (Tensor, Movable)](value: Value, device: torch.device | str) -> Value:
    """A tensor, or a dataclass of tensors, on a device; the host does not wait for copies to a GPU."""
    if isinstance(value, Movable):
        return value.to(device)
    if torch.device(device).type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()  # otherwise the host would wait for the copy
    return value.to(device, non_blocking=True)


def on_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, on the host: all copies are started, then the host waits once for all of them."""
    copies = {name: value.detach().to("cpu", non_blocking=True) for name, value in values.items()}
    for device in {value.device for value in values.values() if value.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def copy_to_gpu[Inputs: Movable](inputs: Inputs, device: torch.device) -> Inputs:
    """A copy on a GPU of inputs on the host, made on a separate stream.

    The copy does not wait for computation on the GPU, and computation queued after this call waits for the copy. If the
    host is ahead of the GPU, a batch is thus copied while the previous one is still being computed.
    """
    computing, copying = torch.cuda.current_stream(device), _copying_stream(device)
    with torch.cuda.stream(copying):
        moved = inputs.to(device)
    computing.wait_stream(copying)
    # Otherwise the allocator would reuse this memory for the next copy as soon as Python releases the tensors.
    return moved.record_stream(computing)


@functools.cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """An asynchronous copy to the host of values, which may change afterwards; reading it waits for it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach().to("cpu", non_blocking=True, copy=True)  # in page-locked memory
        self._copied = torch.cuda.Event() if values.device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record()

    def is_there(self) -> bool:
        """Whether the copy has finished, so that reading does not wait."""
        return self._copied is None or self._copied.query()

    def tolist(self) -> list:
        """The values, as `Tensor.tolist`."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
