"""Running megatron-core and Megatron-Bridge on a machine without CUDA.

Megatron asks for CUDA in many places (`torch.cuda.current_device()`, `torch.zeros(..., device="cuda")`, "nccl"). All
of them use the name `torch` of Megatron's own modules. So in those modules only, `torch` is replaced by an overlay
whose CUDA is the CPU; torch itself is unchanged for all other modules. Only methods of torch's objects have to be
redirected in their classes.

Replaced without CUDA: the names `torch` and `dist` in Megatron's modules; `cuda`, `record_stream` and `type` of
`torch.Tensor` and `torch.nn.Module`, for calls from Megatron's code; `ProcessGroupGloo` of torch; and the names in the
functions that `_SPECIAL` lists. megatron-core has no CPU mode. Delete a function when the reason in its docstring is
gone. A process without CUDA gets these replacements only when it imports Megatron.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

from qwen3vl_bridge.upstream.replacements import When, replace


@functools.cache
def _without_cuda() -> bool:
    import torch

    return not torch.cuda.is_available()


def adopt(module: ModuleType) -> None:
    """Make a Megatron module that has just been executed use the CPU; does nothing if CUDA is available."""
    if not _without_cuda():
        return
    import torch

    if vars(module).get("torch") is torch:
        replace(module, "torch", _torch_on_cpu(), When.NO_CUDA)
    if vars(module).get("dist") is torch.distributed:
        replace(module, "dist", _torch_on_cpu().distributed, When.NO_CUDA)
    if module.__name__ in _SPECIAL:
        _SPECIAL[module.__name__](module)


class _Overlay(ModuleType):
    """A module that has the attributes of another one, with some of them replaced."""

    def __init__(self, base: ModuleType, **names: Any) -> None:
        super().__init__(base.__name__)
        vars(self).update(names, _base=base)

    def __getattr__(self, name: str) -> Any:
        # Submodules (`torch.distributed.checkpoint`) are imported through the real module.
        return getattr(vars(self)["_base"], name)


_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange", "linspace", "eye")
_FACTORIES += ("rand", "randn", "randint", "zeros_like", "ones_like", "empty_like", "full_like")


def _with(function: Callable, change: Callable[[dict[str, Any]], None]) -> Callable:
    """Wrap a function: before each call, `change` modifies its keyword arguments in place."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        change(kwargs)
        return function(*args, **kwargs)

    return call


def _on_cpu(kwargs: dict[str, Any]) -> None:
    """Change keyword arguments of a tensor factory in place: device "cpu" instead of "cuda", and no `pin_memory`."""
    device = kwargs.get("device")
    if device is not None and (type(device) is int or str(device).startswith("cuda")):
        kwargs["device"] = "cpu"
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False


@functools.cache
def _torch_on_cpu() -> _Overlay:
    import torch
    import torch.distributed

    class Device(torch.device.__class__):  # `isinstance(x, torch.device)` still holds in Megatron's modules
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.device)

        def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
            name = args[0] if args else kwargs.get("device", kwargs.get("type"))
            if isinstance(name, str) and name.startswith("cuda"):  # including "cuda:cpu", built from the current device
                return torch.device("cpu")
            made = torch.device(*args, **kwargs)
            return torch.device("cpu") if made.type == "cuda" else made

    distributed = _Overlay(
        torch.distributed,
        init_process_group=_with(_with_gloo(torch.distributed.init_process_group), _alone_without_a_port),
        barrier=lambda group=None, async_op=False, device_ids=None: torch.distributed.barrier(group, async_op),
        new_group=_with_gloo(torch.distributed.new_group),
        new_subgroups_by_enumeration=_with_gloo(torch.distributed.new_subgroups_by_enumeration),
        all_to_all_single=_with(torch.distributed.all_to_all_single, _split_lists),
    )
    return _Overlay(
        torch,
        cuda=_Overlay(torch.cuda, **_cuda_names(torch)),
        distributed=distributed,
        device=Device("device", (), {}),
        **{name: _with(getattr(torch, name), _on_cpu) for name in _FACTORIES},
    )


def _with_gloo(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if arg == "nccl" else arg for arg in args)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return function(*args, **kwargs)

    return call


def _alone_without_a_port(kwargs: dict[str, Any]) -> None:
    """Change the arguments of `init_process_group` for a world of one rank, in place: use an in-memory store.

    torch's default store listens on a port, which another run on this machine may use. If the caller gives a store or
    an address (`init_method`), nothing is changed.
    """
    if kwargs.get("world_size") == 1 and kwargs.get("store") is None and kwargs.get("init_method") is None:
        from torch.distributed import HashStore

        kwargs["store"] = HashStore()


def _split_lists(kwargs: dict[str, Any]) -> None:
    """Convert the split sizes of an all-to-all to lists, in place.

    megatron-core copies split sizes of experts from a GPU as arrays. On a CPU they stay tensors, which torch rejects.
    """
    for name in ("output_split_sizes", "input_split_sizes"):
        if hasattr(kwargs.get(name), "tolist"):
            kwargs[name] = kwargs[name].tolist()


class _Stream:
    """A stream or an event of a device that executes everything synchronously."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def query(self) -> bool:
        return True

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def elapsed_time(self, end: _Stream) -> float:
        return 0.0

    def _nothing(self, *args: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = _nothing


def _cuda_names(torch: ModuleType) -> dict[str, Any]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    return dict(
        current_device=lambda: torch.device("cpu"),
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda *_: _Stream(),
        default_stream=lambda *_: _Stream(),
        stream=lambda _: contextlib.nullcontext(),
        device=lambda _: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
        nvtx=SimpleNamespace(range_push=nothing, range_pop=nothing, range=lambda *_: contextlib.nullcontext()),
    )


def _redirect_method(cls: type, name: str, instead: Callable) -> None:
    """Redirect calls of `cls.name` to `instead(original, self, ...)`, but only calls from Megatron's code."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            return instead(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    replace(cls, name, method, When.NO_CUDA)


def _share_gloo_device(distributed_c10d: Any) -> None:
    """Make all gloo groups created from now on share a network device, unless the user has selected interfaces.

    torch creates one device per group, whose thread wakes up a hundred times a second to look for work. A rank with
    tensor, pipeline, context, expert and data parallelism has dozens of groups. With a device each, 300 idle groups
    took 11.8 % of a core, and destroying them took 1.9 s; with one device 0.2 % and 0.04 s. gloo's devices can be
    shared: connections are distinguished by their sequence numbers.
    """
    own = distributed_c10d.ProcessGroupGloo

    @functools.cache
    def device(process: int) -> Any:  # per process: a forked process does not have its parent's threads
        return own.create_default_device()

    class ProcessGroupGloo(own):
        # torch 2.15 passes one more setting, enable_reconfigure, which its options have, too.
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **settings: Any) -> None:
            if os.environ.get("GLOO_SOCKET_IFNAME"):  # may name several interfaces, for which torch creates devices
                super().__init__(store, rank, size, timeout=timeout, **settings)
                return
            options = own._Options()
            options._devices = [device(os.getpid())]
            options._threads = 2  # torch's number for one device
            options._timeout = timeout
            for name, value in settings.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    replace(distributed_c10d, "ProcessGroupGloo", ProcessGroupGloo, When.NO_CUDA)


def _redirect_torch(_: ModuleType) -> None:
    """Redirect methods of torch's own classes, once `megatron.core`, the first Megatron module, is executed."""
    import torch
    from torch.distributed import distributed_c10d

    _share_gloo_device(distributed_c10d)

    def stay(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    def type_as_on_cuda(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        # The optimizers distinguish precisions by type names such as 'torch.cuda.FloatTensor'.
        result = original(self, *args, **kwargs)
        return re.sub(r"^torch\.(?!cuda)", "torch.cuda.", result) if isinstance(result, str) else result

    _redirect_method(torch.Tensor, "cuda", stay)
    _redirect_method(torch.nn.Module, "cuda", stay)
    _redirect_method(torch.Tensor, "record_stream", lambda *_: None)
    _redirect_method(torch.Tensor, "type", type_as_on_cuda)


def _use_cpu_generator(module: Any) -> None:
    """Make `megatron.core.tensor_parallel.random` track the random number generator of the CPU.

    The module would warn at each change that the state of this generator has changed. The warning is hidden.
    """
    logging.getLogger(module.__name__).addFilter(lambda said: "CPU RNG state changed" not in said.getMessage())
    replace(module, "_get_cuda_rng_state", lambda *_, **__: module.torch.get_rng_state(), When.NO_CUDA)
    replace(
        module, "_set_cuda_rng_state", lambda new_state, *_, **__: module.torch.set_rng_state(new_state), When.NO_CUDA
    )


def _communicate_at_once(module: Any) -> None:
    """Make `_coalescing_manager` complete collectives at the end of its `with` block, and coalesce them by dtype.

    `module` is a module of Megatron that defines parameter buffers.

    Collectives must be complete when the block ends, because gloo's threads use the tensors of a collective in
    progress: if Python frees one of them in the meantime, memory may be corrupted (torch 2.13, also without Megatron).
    Megatron-FSDP gathers into views that exist only for one call; about once in a thousand steps on a busy machine one
    of its ranks was aborted, hung, or failed at a line that cannot fail.

    Tensors must be coalesced by dtype, because gloo gathers their bytes as if all had the first tensor's dtype, which
    gives other values if dtypes differ. NCCL has one call for each tensor (torch 2.13).
    """
    import torch.distributed.distributed_c10d as c10d

    manager = module._coalescing_manager

    @contextlib.contextmanager
    def at_once(group: Any, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        recorded, by_dtype = c10d._world.pg_coalesce_state, collections.defaultdict(list)
        with manager(group, device) as work:
            yield work  # waiting for it returns immediately
            for call in recorded[group]:
                by_dtype[call.tensor.dtype].append(call)
            recorded[group][:] = by_dtype.pop(next(iter(by_dtype), None), [])
        for calls in by_dtype.values():
            with manager(group, device):
                recorded[group][:] = calls

    replace(module, "_coalescing_manager", at_once, When.NO_CUDA)


def _save_in_a_process_of_ours(module: Any) -> None:
    """Make the process that megatron-core starts for asynchronous saves use the CPU.

    That process is spawned, so it inherits none of the redirections. Without them it asks for a GPU and exits, and the
    process that saves waits for it forever. `module` is the module that defines `PersistentAsyncCaller`.
    """
    replace(
        module, "torch", _Overlay(module.torch, cuda=_Overlay(module.torch.cuda, device_count=lambda: 1)), When.NO_CUDA
    )
    caller = module.PersistentAsyncCaller
    caller._save_loop = staticmethod(caller.async_loop)
    replace(caller, "async_loop", staticmethod(_saving_process), When.NO_CUDA)


def _saving_process(*args: Any, **kwargs: Any) -> None:
    """Run megatron-core's loop in the process for asynchronous saves.

    The process unpickles this function, which imports this package and so sets up the redirections.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    PersistentAsyncCaller._save_loop(*args, **kwargs)  # type: ignore[attr-defined]


def _set_up_without_cuda(module: Any) -> None:
    """Make `megatron.bridge.training.initialize` see one GPU, which it requires but does not use."""
    cuda = _Overlay(module.torch.cuda, is_available=lambda: True, device_count=lambda: 1)
    replace(module, "torch", _Overlay(module.torch, cuda=cuda), When.NO_CUDA)


def _mesh_on_cpu(module: Any) -> None:
    """Make Megatron-FSDP's adapter build device meshes with the device type "cpu" instead of "cuda"."""
    mesh = module.DeviceMesh

    class DeviceMesh(mesh):
        @staticmethod
        def from_group(*args: Any, **kwargs: Any) -> Any:
            return mesh.from_group(*args, **{**kwargs, "device_type": "cpu"})

    replace(module, "DeviceMesh", DeviceMesh, When.NO_CUDA)


# Functions by module name. Each function is called after its module has been executed.
_SPECIAL: dict[str, Callable[[Any], None]] = {
    "megatron.core": _redirect_torch,
    # On a CPU, compiling many small functions takes minutes of C++ compilation and gains nothing.
    "megatron.core.jit": lambda module: module.disable_jit_fuser(),
    "megatron.core.tensor_parallel.random": _use_cpu_generator,
    "megatron.core.dist_checkpointing.strategies.async_utils": _save_in_a_process_of_ours,
    "megatron.core.distributed.param_and_grad_buffer": _communicate_at_once,
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer": _communicate_at_once,
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": _mesh_on_cpu,
    "megatron.bridge.training.initialize": _set_up_without_cuda,
    # The function looks for a GPU of this machine, even in a dry run for GPUs of another machine.
    "megatron.bridge.training.flex_dispatcher_backend": lambda module: replace(
        module, "validate_flex_dispatcher_backend", lambda _: None, When.NO_CUDA
    ),
}
