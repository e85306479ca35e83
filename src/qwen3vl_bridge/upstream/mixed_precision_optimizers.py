"""Save and load optimizer states of models that have both 16-bit and float32 parameters.

megatron-core's optimizers of 16-bit models also train float32 parameters (linear attention has some). They find the
state of a parameter by its index in a parameter group. But the parameters are in one order when a group is built, and
in another order when its state is saved. So states would be saved under the names of other parameters, or not at all if
the sizes differ.

Replaced: `MegatronOptimizer.__init__` of `megatron.core.optimizer.optimizer`, which all optimizers call. It overrides
methods of the new object if it is one of these:

- A `DistributedOptimizer` with a group of two dtypes. Its `_build_optimizer_group_ranges` puts the parameters of a
  group in the order of buffers, but the optimizer itself puts float32 parameters first.
- A `Float16OptimizerWithFloat16Params` with a float32 parameter. Its `sharded_state_dict` and `load_state_dict` use a
  list of the 16-bit parameters only, as if an index in this list were an index in the list of all parameters.

megatron-core has no setting that selects a subclass of them, and callers such as verl call `get_megatron_optimizer`
directly. Delete this module when both classes save groups of two dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from qwen3vl_bridge.upstream.replacements import When, replace

import torch


def save_all_dtypes(module: ModuleType) -> None:
    """Make optimizers that are created from now on save and load the states of parameters of two dtypes.

    Args:
        module: `megatron.core.optimizer.optimizer`.
    """
    kind = module.MegatronOptimizer
    theirs = kind.__init__

    @functools.wraps(theirs)
    def __init__(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, optimizer, *args, **kwargs)
        groups = getattr(optimizer, "param_groups", ())
        _correct(self, [{parameter.dtype for parameter in group["params"]} for group in groups])

    replace(kind, "__init__", __init__, When.ALWAYS)


def _correct(optimizer: Any, dtypes: list[set[torch.dtype]]) -> None:
    """Make an optimizer save and load the states of parameters of two dtypes.

    `dtypes` lists the set of dtypes in each parameter group.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    if isinstance(optimizer, DistributedOptimizer):
        if all(len(of_group) < 2 for of_group in dtypes):
            return
        optimizer._build_optimizer_group_ranges = functools.partial(
            _with_float32_first, optimizer._build_optimizer_group_ranges
        )
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params) and any(torch.float32 in one for one in dtypes):
        optimizer.sharded_state_dict = _of_all_parameters(optimizer, optimizer.sharded_state_dict)
        optimizer.load_state_dict = _of_all_parameters(optimizer, optimizer.load_state_dict)


def _with_float32_first(
    build: Callable[..., Any], param_groups: list[dict], gbuf_ranges: list[dict]
) -> tuple[dict, list[dict]]:
    indices, ranges = build(param_groups, gbuf_ranges)
    for number, group in enumerate(ranges):
        group["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
        indices.update((parameter, (number, index)) for index, parameter in enumerate(group["params"]))
    return indices, ranges


def _of_all_parameters(optimizer: Any, theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def method(*args: Any, **kwargs: Any) -> Any:
        with _with_float32(optimizer):
            return theirs(*args, **kwargs)

    return method


@contextlib.contextmanager
def _with_float32(optimizer: Any) -> Iterator[None]:
    """Add float32 parameters to the optimizer's lists of 16-bit parameters inside the `with` block.

    The lists then have the order of the optimizer's groups. A float32 parameter is listed as its own float32 copy.
    """
    before = optimizer.float16_groups, optimizer.fp32_from_float16_groups
    models, copies = (itertools.chain.from_iterable(groups) for groups in before)
    of_copy = dict(zip(copies, models, strict=True))
    trained = [list(group["params"]) for group in optimizer.optimizer.param_groups]
    optimizer.fp32_from_float16_groups = trained
    optimizer.float16_groups = [[of_copy.get(parameter, parameter) for parameter in group] for group in trained]
    try:
        yield
    finally:
        optimizer.float16_groups, optimizer.fp32_from_float16_groups = before
