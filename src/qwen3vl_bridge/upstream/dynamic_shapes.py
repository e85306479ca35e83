"""Compile functions on a GPU for any number of tokens.

Called: `torch._dynamo.maybe_mark_dynamic`, which torch documents but does not export under a public name. Without it
torch compiles a function for the first number of tokens, and again for the second. Delete `mark_dynamic` when torch
exports it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import jit
from torch import Tensor


def mark_dynamic(x: Tensor, dimension: int) -> None:
    """Mark a dimension as dynamic, so that compiled functions are not specialized on its size unless they must be."""
    torch._dynamo.maybe_mark_dynamic(x, dimension)


def can_compile(x: Tensor) -> bool:
    """Return True if `call_compiled` compiles for `x`: if it is on a GPU, and `dist.disable_jit_fuser` is not set."""
    return x.is_cuda and jit.jit_fuser is not jit.noop_decorator


def call_compiled(function: Callable[..., Any], *by_token: Tensor, others: tuple[Any, ...] = ()) -> Any:
    """Call `function(*by_token, *others)`. On a GPU, compile it for tensors `by_token` [tokens, ...] of any length.

    Inside a function that is being compiled, the call becomes part of that function.
    """
    if not can_compile(by_token[0]) or torch.compiler.is_compiling():
        return function(*by_token, *others)
    for x in by_token:
        mark_dynamic(x, 0)
    return _compile(function, *(x.shape[1:] for x in by_token))(*by_token, *others)


@functools.cache
def _compile(function: Callable[..., Any], *shapes: torch.Size) -> Callable[..., Any]:
    """Return `function` compiled for one tensor [tokens, *shape] for each of `shapes`, with any number of tokens."""
    # torch compiles at most eight variants of a function, and counts them per code object. With a copied code object
    # per set of shapes, only dtypes and gradients add variants.
    return torch.compile(types.FunctionType(function.__code__.replace(), function.__globals__))
