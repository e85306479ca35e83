"""Wrappers of a model in training: data parallelism, Megatron-FSDP, half precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The innermost model. megatron-core's `unwrap_model` stops at Megatron-FSDP, which is a wrapper in a wrapper."""
    for wrapper in _layers(model):
        model = wrapper
    return model


def megatron_fsdp(model: nn.Module) -> MegatronFSDP | None:
    """The Megatron-FSDP wrapper of a model, if any: its ranks gather each other's parameters in every forward pass."""
    return next((layer for layer in _layers(model) if isinstance(layer, MegatronFSDP)), None)


@contextlib.contextmanager
def callable_in_parts(model: nn.Module) -> Iterator[None]:
    """Let the innermost model's modules be called one by one, in forward passes.

    Hooks gather a module's parameters when it is called. Between steps, however, the optimizer's own parameters are in
    place until the whole model is called.
    """
    sharded = megatron_fsdp(model)
    if sharded is None or not sharded.is_param_fsdp_distributed:
        yield
        return
    sharded._replace_param_with_raw_if_needed()
    try:
        yield
    finally:
        sharded._replace_param_with_distributed_if_needed()


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """A model, the module inside it, and so on."""
    yield model
    while isinstance(model := getattr(model, "module", None), nn.Module):  # pyright: ignore[reportAssignmentType]
        yield model
