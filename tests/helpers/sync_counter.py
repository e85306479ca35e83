"""Count host-device synchronizations (syncs) of a training step on a machine without a GPU.

Everything is computed on the CPU. Tensors that would be on a GPU report the device "cuda:0". Streams and events do
nothing, and memory counts as pinned if it was requested as pinned. A storage is on the GPU if
- it was there at the beginning (`on_gpu`: parameters, buffers, gradients),
- it was moved there (`.to`, `.cuda`, `copy_`) or created there (`device=`),
- it is the result of an operation with a tensor on the GPU, or was sent by a collective (as with NCCL).

These count as synchronizations:
- reading a value: `_local_scalar_dense` (`item`, `bool`, `int`, `float`, an index), `tolist`, `equal`;
- a result whose size depends on values: `nonzero`, boolean indexing, `repeat_interleave` without `output_size`;
- a copy between host and GPU without `non_blocking`, or from memory that is not pinned;
- creating a tensor from values on the GPU: `torch.tensor`, `as_tensor`, `asarray` and `new_tensor` read each value;
- sending objects between ranks, barriers, and synchronizing streams, events and devices;
- an error: using a `non_blocking` copy on the host before any synchronization.
A synchronization is attributed to the innermost line of a package on the stack. In a backward pass without such a line,
it is attributed to the line of the forward operation.

Limits: no GPU kernels, and no lines that run only if `is_cuda` or `torch.cuda.is_available` is True. Synchronizing an
event counts unless another synchronization came after the event was recorded: all streams are treated as one.
On a GPU `torch.cuda.set_sync_debug_mode` is authoritative.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import qwen3vl_bridge
from qwen3vl_bridge.upstream import cpu

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

PACKAGES = {
    "ours": f"{Path(qwen3vl_bridge.__file__).parent}/",  # not any folder of this name, as clones have
    "megatron-core": "/megatron/core/", "Megatron-Bridge": "/megatron/bridge/", "transformers": "/transformers/",
}  # fmt: skip
UPSTREAM = ("megatron-core", "Megatron-Bridge")
_HERE = str(Path(__file__).parent / "counter.py")
_NO_FRAMES_OF_OURS = "/upstream/cpu.py"  # which is not there on a GPU


class Sync(NamedTuple):
    """A place in the code that synchronizes host and device."""

    package: str  # one of `PACKAGES`, or "others"
    place: str  # file:line in it
    function: str  # file:function, independent of line numbers
    what: str


class Seen(NamedTuple):
    """Counts of synchronizations."""

    syncs: dict[Sync, int]
    mixed: dict[Sync, int]  # operations with tensors on both GPU and host, which fail on a GPU

    def of(self, package: str) -> dict[str, int]:
        return {f"{one.place} {one.what}": n for one, n in sorted(self.syncs.items()) if one.package == package}

    def own_syncs(self) -> dict[Sync, int]:
        """Return the synchronizations outside of megatron-core and Megatron-Bridge.

        They include those in functions of transformers, which our code calls.
        """
        return {sync: n for sync, n in self.syncs.items() if sync.package not in UPSTREAM}

    def total(self, package: str) -> int:
        return sum(self.of(package).values())


def place_in_code() -> tuple[str, str, str]:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if found := _in_package(name, frame.f_lineno, frame.f_code.co_name):
            return found
        if frame.f_code.co_name == "_engine_run_backward":  # no such line: C++ computes gradients
            break
        frame = frame.f_back
    else:
        return "others", "the caller", "the caller"
    node = torch._C._current_autograd_node()
    lines = (node.metadata.get("traceback_") or []) if node is not None else []
    for line in reversed(lines):
        name, _, rest = line.strip().removeprefix('File "').partition('", line ')
        number, _, function = rest.partition("\n")[0].partition(", in ")
        if found := _in_package(name, number, function):
            return found[0], f"{found[1]}, its gradient", f"{found[2]}, its gradient"
    return "others", "a gradient", "a gradient"


def in_a_gradient() -> bool:
    if torch._C._current_autograd_node() is None:
        return False
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, torch.__path__[0])):
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


def _in_package(name: str, line: Any, function: str) -> tuple[str, str, str] | None:
    if name.endswith(_NO_FRAMES_OF_OURS):
        return None
    for package, folder in PACKAGES.items():
        if folder in name:
            file = name.rpartition(folder)[2]
            return package, f"{file}:{line}", f"{file}:{function}"
    return None


INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_")
# Operations with results of a size that depends on values.
_SIZED_BY_VALUES = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "bincount", "is_nonzero",
}  # fmt: skip


def storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # subclasses without one
        return None


def sync_reason(
    name: str, args: tuple, kwargs: dict[str, Any], is_on_gpu: Callable[[Any], bool], *, copies: bool
) -> str | None:
    """Return why an operation with a tensor on the GPU synchronizes; None if it does not."""
    if name in _SIZED_BY_VALUES:
        return name
    if name == "equal":
        first, second = args  # torch compares shapes and storages first
        same = storage(first) == storage(second) and first.storage_offset() == second.storage_offset()
        return None if first.shape != second.shape or (same and first.stride() == second.stride()) else name
    if name == "_local_scalar_dense":
        return "a value"
    if name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 2:
        return "repeat_interleave without output_size"
    if name == "copy_":
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        apart = is_on_gpu(args[0]) != is_on_gpu(args[1])
        return "copy_ between host and GPU" if copies and blocking and apart and args[1].dim() else None
    return _index_reason(name, args, is_on_gpu) if name in INDEXING else None


def _index_reason(name: str, args: tuple, is_on_gpu: Callable[[Any], bool]) -> str | None:
    indices = [one for one in args[1] if one is not None]
    booleans = [one for one in indices if one.dtype in (torch.bool, torch.uint8)]
    fills = name != "index" and len(indices) == 1 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
    if booleans and not fills:  # a fill is masked_fill
        return "booleans as an index"
    if any(one.dim() and not is_on_gpu(one) for one in indices):
        return "an index on the host"
    return None


GPU = torch.device("cuda", 0)
# Functions that create a tensor from values, and synchronize to read or copy them.
_FROM_VALUES = ("tensor", "as_tensor", "asarray", "new_tensor")
_TOO_EARLY = "a copy that has not arrived"
_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier")


class HostSyncCounter:
    """Count synchronizations in a block: `with HostSyncCounter(model) as counter: ...`."""

    def __init__(self, *on_gpu: Any) -> None:
        self.begin()
        self.total = 0
        self._storages: dict[int | None, StorageWeakRef] = {}
        self._pinned: dict[int | None, StorageWeakRef] = {}
        self._copied: dict[int | None, int] = {}  # copies to the host, with the number of earlier synchronizations
        self._paused = self._blind = self._copies = False
        for one in on_gpu:
            self.on_gpu(one)

    def on_gpu(self, values: Any) -> None:
        """Treat tensors as being on the GPU: those of a module with gradients, or any in lists, dicts and tuples."""
        if isinstance(values, torch.nn.Module):
            for module in values.modules():
                if isinstance(module, DistributedDataParallel):
                    buffers = (*module.buffers, *module.expert_parallel_buffers)
                    self.on_gpu([(one.param_data, one.grad_data) for one in buffers])
            tensors = [*values.parameters(), *torch.nn.Module.buffers(values)]  # DistributedDataParallel has others
            tensors += [getattr(one, name, None) for one in tensors for name in ("grad", "main_grad", "main_param")]
        else:
            tensors = list(tree_iter(values))
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._place(tensor)

    def pinned(self, values: Any) -> None:
        """Treat host tensors in lists, dicts and tuples as being in pinned memory, like those of a data loader."""
        for tensor in tree_iter(values):
            if isinstance(tensor, Tensor):
                self._pinned[storage(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def begin(self) -> None:
        self._found: Counter[Sync] = Counter()
        self._mixed: Counter[Sync] = Counter()

    def seen(self) -> Seen:
        return Seen(dict(self._found), dict(self._mixed))

    def __enter__(self) -> "HostSyncCounter":
        self._stack = ExitStack()
        for context in (torch.autograd.set_detect_anomaly(True, check_nan=False), *self._patches()):
            self._stack.enter_context(context)
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # Devices of tensors.

    def is_on_gpu(self, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        return storage(tensor) in self._storages

    def _place(self, tensor: Tensor) -> Tensor:
        key = storage(tensor)
        if key is not None and key not in self._storages:
            # The weak reference prevents that another storage gets the same address.
            self._storages[key] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        yield
        self._paused = before

    def note(self, what: str, into: Counter[Sync] | None = None) -> None:
        if not self._paused:
            self.total += into is None
            (self._found if into is None else into)[Sync(*place_in_code(), what)] += 1

    # Functions and operations of torch.

    def function(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", "")
        first = args[0] if args else None
        if name == "__get__" and getattr(function, "__self__", None) is Tensor.device:
            return GPU if self.is_on_gpu(first) else function(*args, **kwargs)
        if name == "tolist" and (self.is_on_gpu(first) or self._may_be_incomplete(first)):
            self.note("tolist" if self.is_on_gpu(first) else _TOO_EARLY)
            with self.paused():
                return function(*args, **kwargs)
        if name == "pin_memory":
            copy = first.clone()
            self.pinned(copy)
            return copy
        if name in ("copy_", "__setitem__"):
            self._copies = True  # only these: gloo copies through host memory too, NCCL does not
            try:
                return function(*args, **kwargs)
            finally:
                self._copies = False
        if name in ("cpu", "to"):
            return self._move(name, function, args, kwargs)
        if name in _FROM_VALUES:
            return self._create_from_values(name, function, args, kwargs)
        if _is_gpu(kwargs.get("device")):
            made = function(*args, **kwargs | dict(device="cpu"))
            return self._place(made) if isinstance(made, Tensor) else made
        return function(*args, **kwargs)

    def _create_from_values(self, name: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Create a tensor from a tensor, an array or a list; torch reads each value on the GPU by itself."""
        given = args[1:] if name == "new_tensor" else args
        values = given[0] if given else kwargs.get("data", kwargs.get("obj"))
        here = self.is_on_gpu(values)
        if kwargs.get("device") is not None:
            there = _is_gpu(kwargs["device"])
            kwargs = kwargs | (dict(device="cpu") if there else {})
        else:
            there = self.is_on_gpu(args[0]) if name == "new_tensor" else here
        if isinstance(values, Tensor):
            if here and not there:
                self.note(f"{name}: a copy to the host")
        else:
            for one in tree_iter(values):
                if self.is_on_gpu(one):
                    self.note(f"{name} of values on the GPU")
        if there and not here:
            self.note(f"{name} of host values")
        with self.uncounted():
            made = function(*args, **kwargs)
            if self.is_on_gpu(made) != there or (there and not here):
                made = made.clone()
        return self._place(made) if there else made

    def _move(self, name: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        here, there = self.is_on_gpu(tensor), name != "cpu" and self._goes_to_gpu(rest, kwargs)
        rest = ["cpu" if _is_gpu(one) else one for one in rest]
        result = function(tensor, *rest, **kwargs | (dict(device="cpu") if _is_gpu(kwargs.get("device")) else {}))
        if there is None or there == here:
            return result
        if not kwargs.get("non_blocking"):
            self.note(f"{name}: a copy to the {'GPU' if there else 'host'}")
        elif there and storage(tensor) not in self._pinned:
            self.note(f"{name}: a copy of memory that is not pinned")
        if result.untyped_storage()._cdata == tensor.untyped_storage()._cdata or self.is_on_gpu(result) != there:
            with self.uncounted():
                result = result.clone()
        if not there and kwargs.get("non_blocking"):
            self.pinned(result)
            self._copied[storage(result)] = self.total
        return self._place(result) if there else result

    def _may_be_incomplete(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a copy to the host that may be incomplete."""
        return self._copied.get(storage(tensor)) == self.total

    def _goes_to_gpu(self, rest: list[Any], kwargs: dict[str, Any]) -> bool | None:
        """Return whether `Tensor.to` moves a tensor to the GPU; None if it changes no device."""
        for one in (*rest, kwargs.get("other"), kwargs.get("device")):
            if isinstance(one, Tensor):
                return self.is_on_gpu(one)
            if isinstance(one, str | torch.device) or type(one) is int:
                return _is_gpu(one)
        return None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Ignore operations of the counter itself."""
        before, self._blind = self._blind, True
        yield
        self._blind = before

    def operation(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._blind:
            return op(*args, **kwargs)
        name, space = op._schema.name.partition("::")[2], op.namespace
        tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        there = [self.is_on_gpu(one) for one in tensors]
        if space == "c10d":
            there = [True] * len(tensors)
            for one in tensors:
                self._place(one)
        what = sync_reason(name, args, kwargs, self.is_on_gpu, copies=self._copies) if any(there) else None
        if what or any(map(self._may_be_incomplete, tensors)):
            self.note(what or _TOO_EARLY)
        result = op(*args, **kwargs)
        if name == "copy_":
            return result
        if any(there) or (not tensors and in_a_gradient()):
            if space == "aten" and name not in INDEXING:
                self._check_mixed(op, tensors, there)
            for one in tree_iter(result):
                if isinstance(one, Tensor):
                    self._place(one)
        return result

    def _check_mixed(self, op: Any, tensors: list[Tensor], there: list[bool]) -> None:
        """Note host tensors in an operation on the GPU. Scalars are allowed; the device of empty tensors is unknown."""
        for one, is_there in zip(tensors, there, strict=True):
            if not is_there and one.dim() and one.numel():
                self.note(f"{op} with a host tensor {list(one.shape)}", self._mixed)
                self._place(one)

    # Functions of Megatron's modules and of processes.

    def _patches(self) -> Iterator[Any]:
        overlay = vars(cpu._torch_on_cpu())
        yield mock.patch.dict(overlay, {name: _for_gpu(getattr(torch, name)) for name in cpu._FACTORIES})
        yield mock.patch.dict(overlay, device=torch.device)
        here = dict(current_device=lambda: 0, synchronize=lambda *_: self.note("the device"))
        yield mock.patch.dict(vars(overlay["cuda"]), here)
        streams = ("Stream", "current_stream", "stream")
        for name, instead in (here | {name: vars(overlay["cuda"])[name] for name in streams}).items():
            yield mock.patch.object(torch.cuda, name, instead)
        yield mock.patch.object(torch.cuda, "Event", lambda *_, **__: _Event(self))
        yield mock.patch.object(cpu._Stream, "synchronize", lambda _: self.note("a stream or an event"))
        yield mock.patch.object(Tensor, "record_stream", lambda *_: None)
        yield mock.patch.object(Tensor, "cuda", lambda *args, **kwargs: self._cuda(*args, **kwargs))
        # In a mode torch cannot create this subclass of Tensor.
        yield mock.patch.object(CausalBias, "__new__", _unseen(CausalBias.__new__))
        yield mock.patch.object(torch.autograd, "_engine_run_backward", self._backward)
        yield mock.patch.object(dist, "get_backend", lambda *_: "nccl")
        for name in _OBJECTS:
            yield mock.patch.object(dist, name, self._once(getattr(dist, name), name))

    def _cuda(self, tensor: Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
        return tensor.to(GPU, non_blocking=non_blocking)

    def _backward(self, *args: Any, **kwargs: Any) -> Any:
        """Enter the mode again: it is off while `torch.autograd.backward`, itself a function of the mode, runs."""
        with _Functions(self):
            return _engine_run_backward(*args, **kwargs)

    def _once(self, function: Callable, name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            with self.paused():
                return function(*args, **kwargs)

        return call


class _Event(cpu._Stream):
    """A CUDA event on a single stream: complete if a synchronization came after it was recorded."""

    def __init__(self, counter: HostSyncCounter) -> None:
        self._counter, self._recorded = counter, 0

    def record(self, *_: Any) -> None:
        self._recorded = self._counter.total

    def query(self) -> bool:
        return self._counter.total > self._recorded

    def synchronize(self) -> None:
        if not self.query():
            self._counter.note("an event")


def _is_gpu(device: Any) -> bool:
    if isinstance(device, str | torch.device):
        return str(device).startswith("cuda")
    return type(device) is int


def _for_gpu(factory: Callable) -> Callable:
    """Return a factory function that supports pin_memory, for Megatron's modules."""

    def make(*args: Any, **kwargs: Any) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        made = factory(*args, **kwargs)
        return made.pin_memory() if pinned else made

    return make


def _unseen(function: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


class _Functions(TorchFunctionMode):
    def __init__(self, counter: HostSyncCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.counter.function(function, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, counter: HostSyncCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.counter.operation(op, args, kwargs or {})
