"""Access private parts of Megatron-Bridge's adapters.

Called: `ParallelLinearAdapter._get_init_fn` and `DoRALinear._get_weight_norm`. Read: `AdapterWrapper._adapter_enabled`,
and `ModuleMatcher._alias_to_pattern`, a dict from each target that a user has written to its pattern. Delete a function
when the name that it uses is public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    from megatron.bridge.peft.base import PEFT
    from megatron.bridge.peft.dora_layers import DoRALinear
    from megatron.bridge.peft.utils import ParallelLinearAdapter
    from torch import Tensor


def initializer(adapter: ParallelLinearAdapter, method: str) -> Callable[[Tensor], Any]:
    """Return the function that fills a matrix of an adapter in place by the initialization method, such as "xavier"."""
    return adapter._get_init_fn(method)


def written_targets(peft: PEFT) -> Mapping[str, str]:
    """Return the pattern of each entry that the user wrote in `target_modules`.

    The dict is empty if no entry is known.
    """
    return getattr(peft, "_alias_to_pattern", {})


def is_enabled(wrapper: AdapterWrapper) -> bool:
    """Return True if a wrapped layer adds the output of its adapter."""
    return wrapper._adapter_enabled


def row_norms(layer: DoRALinear) -> Tensor:
    """Return the row norms [output size] of a DoRA layer's base weight plus its low-rank update, without a gradient."""
    with torch.no_grad():
        return layer._get_weight_norm()
