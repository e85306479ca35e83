"""Hooks that are registered on a torch module.

Read: `_forward_pre_hooks`, `_forward_hooks`, `_backward_pre_hooks` and `_backward_hooks` of `torch.nn.Module`, which
has no function to list them. Code that computes with a module's weights without calling the module must know
whether hooks expect the call. Delete this module when torch has such a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run before a module's forward."""
    return list(module._forward_pre_hooks.values())


def has_later_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks that run after its forward, or in the backward pass."""
    return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)
