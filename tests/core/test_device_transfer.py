"""Copies to a GPU, recorded on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qwen3vl_bridge.core import device_transfer
from qwen3vl_bridge.core.device_transfer import Transferable, copy_to_gpu
from qwen3vl_bridge.training.step import to_device

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.core.support import random_batch

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, name: str, requests: list[tuple]) -> None:
        self.name, self._requests = name, requests

    def wait_stream(self, other: "Stream") -> None:
        self._requests.append((self.name, "waits for", other.name))


class Requests(TorchFunctionMode):
    """Record requests to torch while active: (stream, action, storage or stream)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.made: list[tuple] = []
        self.current = self.computing = Stream("computing", self.made)
        self._pinned: list[int] = []
        self._kept: list[Tensor] = []
        device_transfer._copy_stream.cache_clear()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("copying", self.made))
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream))

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.computing

    def _record(self, tensor: Tensor, stream: Stream) -> None:
        self.made.append((stream.name, "uses", tensor.data_ptr()))

    def _note(self, what: str, tensor: Tensor) -> None:
        self._kept.append(tensor)  # so that no other gets its address
        self.made.append((self.current.name, what, tensor.data_ptr()))

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name, first = getattr(function, "__name__", ""), args[0] if args else None
        if name == "__get__" and getattr(function, "__self__", None) is Tensor.device:
            return GPU if isinstance(first, torch.nn.Parameter) else torch.device("cpu")
        if name == "pin_memory":
            pinned = first.clone()
            self._pinned.append(pinned.data_ptr())
            self._note("pins", pinned)
            return pinned
        if name == "to" and args[1] == GPU:
            assert kwargs == {"non_blocking": True} and first.data_ptr() in self._pinned, "the host would wait"
            moved = first.clone()
            self._note("copies", moved)
            return moved
        return function(*args, **kwargs or {})


@pytest.fixture
def requests(monkeypatch):
    yield Requests(monkeypatch)
    device_transfer._copy_stream.cache_clear()


def tensors_of(inputs: Transferable) -> list[Tensor]:
    found: list[Tensor] = []
    for value in vars(inputs).values():
        found += tensors_of(value) if isinstance(value, Transferable) else [value] if isinstance(value, Tensor) else []
    return found


def places(requests: list[tuple], stream: str, what: str) -> list[int]:
    return [number for number, (by, done, _) in enumerate(requests) if (by, done) == (stream, what)]


def test_copy_to_gpu_makes_compute_stream_wait_for_copy_stream(requests):
    """Two microbatches in a row, as in a training step."""
    model = torch.nn.Linear(1, 1)
    shares = [random_batch(np.random.default_rng(seed), 1, packed=True).local() for seed in (0, 1)]
    for share in shares:
        requests.made.clear()
        with requests:
            moved = to_device(share, model)
        made, (there, before) = requests.made, (tensors_of(moved), tensors_of(share))
        assert len(there) == len(before) > 10
        for one, other in zip(there, before, strict=True):
            assert one.data_ptr() != other.data_ptr() and one.equal(other)
        copies, (waits,) = places(made, "copying", "copies"), places(made, "computing", "waits for")
        assert len(copies) == len(there) and made[waits][2] == "copying" and max(copies) < waits
        assert not places(made, "copying", "waits for") and not places(made, "computing", "copies")
        # Or the copy after next would be written where this microbatch is still computed.
        used = {made[place][2] for place in places(made, "computing", "uses")}
        assert used == {one.data_ptr() for one in there} == {made[place][2] for place in copies}


def test_copy_to_gpu_twice_reuses_stream_of_device(requests, monkeypatch):
    streams = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or Stream("copying", []))
    share = random_batch(np.random.default_rng(0), 1, packed=False).local()
    with requests:
        copy_to_gpu(share, GPU)
        copy_to_gpu(share, GPU)
    assert streams == [GPU]


def test_to_device_on_cpu_copies_no_tensor():
    share = random_batch(np.random.default_rng(0), 1, packed=True).local()
    moved = to_device(share, torch.nn.Linear(1, 1))
    assert [one.data_ptr() for one in tensors_of(moved)] == [one.data_ptr() for one in tensors_of(share)]
