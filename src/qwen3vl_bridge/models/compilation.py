"""Functions of tokens that torch compiles on a GPU."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import jit
from torch import Tensor


def compiles(x: Tensor) -> bool:
    """Whether functions of a tensor are compiled: on a GPU, unless `dist.disable_jit_fuser` is set."""
    return x.is_cuda and jit.jit_fuser is not jit.noop_decorator


def run_by_token(function: Callable[..., Any], *by_token: Tensor, others: tuple[Any, ...] = ()) -> Any:
    """A function of tensors [t, ...], and of others: compiled on a GPU for any number of tokens.

    Within a function that is compiled itself it is a part of that.
    """
    if not compiles(by_token[0]) or torch.compiler.is_compiling():
        return function(*by_token, *others)
    for x in by_token:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return compiled(function, *(x.shape[1:] for x in by_token))(*by_token, *others)


@functools.cache
def compiled(function: Callable[..., Any], *shapes: torch.Size) -> Callable[..., Any]:
    """A function compiled for tokens of these shapes, with a copied code object.

    torch compiles at most eight variants of a function, counted per code object. The remaining variants are due to
    dtypes and gradients.
    """
    return torch.compile(types.FunctionType(function.__code__.replace(), function.__globals__))
