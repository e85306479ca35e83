"""megatron-core's optimizers of 16-bit models, for models in which some parameters are in float32.

Both optimizers train such models, but find a parameter's state by its index in its group, which they count differently
when they build a group and when they save it. Where all parameters have one dtype, nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any


def replace_in_distributed_optimizer(module: Any) -> None:
    """`megatron.core.optimizer.distrib_optimizer`: a group's float32 parameters come first, as in the groups it builds.

    Otherwise states are saved under the names of other parameters, or not at all if their sizes differ.
    """
    optimizer = module.DistributedOptimizer
    theirs = optimizer._build_optimizer_group_ranges

    def build(param_groups: list[dict], gbuf_ranges: list[dict]) -> tuple[dict, list[dict]]:
        places, ranges = theirs(param_groups, gbuf_ranges)
        for number, group in enumerate(ranges):
            group["params"].sort(key=lambda parameter: parameter.dtype != module.torch.float32)
            places.update((parameter, (number, place)) for place, parameter in enumerate(group["params"]))
        return places, ranges

    optimizer._build_optimizer_group_ranges = staticmethod(build)


def replace_in_replicated_optimizer(module: Any) -> None:
    """`megatron.core.optimizer.optimizer`: the optimizer that is not distributed saves and loads all parameters.

    It has a list of 16-bit parameters and their float32 copies, and takes indices in this list for indices in the
    group.
    """
    optimizer = module.Float16OptimizerWithFloat16Params
    optimizer.sharded_state_dict = _of_all_parameters(optimizer.sharded_state_dict)
    optimizer.load_state_dict = _of_all_parameters(optimizer.load_state_dict)


def _of_all_parameters(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _float32_beside_copies(self):
            return theirs(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def _float32_beside_copies(optimizer: Any) -> Iterator[None]:
    """Its lists hold float32 parameters too, in the groups' order: each as its own copy."""
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
