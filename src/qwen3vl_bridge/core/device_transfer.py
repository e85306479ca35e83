"""Copy tensors between host and device without blocking the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor


class Transferable:
    """Base class of dataclasses with tensors. Methods apply to all tensors, also in nested `Transferable` fields."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy with every tensor on `device`, see `copy_to_device`."""
        return self._map_tensors(lambda value: copy_to_device(value, device))

    def pin_memory(self) -> Self:
        """Return a copy with every tensor in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map_tensors(lambda value: value.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> Self:
        """Tell the allocator that `stream` uses the tensors, as `Tensor.record_stream` does, and return this object."""

        def record(value: Any) -> Any:
            value.record_stream(stream)
            return value

        return self._map_tensors(record)

    def _map_tensors(self, change: Callable[[Any], Any]) -> Self:
        assert is_dataclass(self)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: change(v) for n, v in values.items() if isinstance(v, Tensor | Transferable)})


def copy_to_device[Value: (Tensor, Transferable)](value: Value, device: torch.device | str) -> Value:
    """Return a tensor, or a dataclass of tensors, on a device. The host does not wait for copies to a GPU."""
    if isinstance(value, Transferable):
        return value.to(device)
    if torch.device(device).type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()  # a copy from pageable memory would block the host
    return value.to(device, non_blocking=True)


def to_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of named tensors on the host. The host waits once, after all copies have been started."""
    copies = {name: value.detach().to("cpu", non_blocking=True) for name, value in values.items()}
    for device in {value.device for value in values.values() if value.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def copy_to_gpu[Inputs: Transferable](inputs: Inputs, device: torch.device) -> Inputs:
    """Return a copy of host inputs on a GPU, made on a separate stream.

    The copy does not wait for computation on the GPU; computation queued after this call waits for the copy. If the
    host runs ahead of the GPU, a batch is copied while the previous batch is still computed.
    """
    compute_stream, copy_stream = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(copy_stream):
        copied = inputs.to(device)
    compute_stream.wait_stream(copy_stream)
    # Without this the allocator would reuse the memory for the next copy as soon as Python releases the tensors.
    return copied.record_stream(compute_stream)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """An asynchronous copy of a tensor to the host. The tensor may change afterwards; reading the copy waits for it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach().to("cpu", non_blocking=True, copy=True)  # in page-locked memory
        self._copied = torch.cuda.Event() if values.device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record()

    def is_ready(self) -> bool:
        """Return whether the copy has finished, so that reading does not wait."""
        return self._copied is None or self._copied.query()

    def tolist(self) -> list:
        """Wait for the copy to finish, and return its values as `Tensor.tolist` does."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
