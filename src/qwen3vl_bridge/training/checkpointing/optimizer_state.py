"""What megatron-core's optimizers keep of each parameter.

What lives here: finding and completing it. What may not: files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_states(optimizer: MegatronOptimizer) -> dict[Tensor, dict[str, Any]]:
    """What Adam keeps of each tensor that it steps, to be read and written; zeros where it has not stepped yet."""
    states = {}
    # Experts have an optimizer of their own; one has nothing to step where all of a rank's parameters are frozen.
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.param_groups:
            for tensor in group["params"]:
                state = states[tensor] = one.optimizer.state[tensor]
                for moment in MOMENTS:
                    if moment not in state:
                        state[moment] = torch.zeros_like(tensor, dtype=torch.float32)
    return states


def _stepping_groups(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [group for one in chain for group in one.param_groups if group["params"]]


def steps_of(optimizer: MegatronOptimizer) -> int:
    """Steps it has made; 0 on a rank that has nothing to step."""
    return max((int(group.get("step", 0)) for group in _stepping_groups(optimizer)), default=0)


def set_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Make it go on after so many steps."""
    for group in _stepping_groups(optimizer):
        group["step"] = steps


def copy_main_to_model(model: Sequence[torch.nn.Module]) -> None:
    """Round the optimizer's float32 copies into the parameters they are copies of."""
    for chunk in model:
        for parameter in chunk.parameters():
            if hasattr(parameter, "main_param"):
                parameter.data.copy_(parameter.main_param)


def copy_model_to_main(model: Sequence[torch.nn.Module]) -> None:
    """Make the optimizer's float32 copies of what is in the parameters."""
    for chunk in model:
        for parameter in chunk.parameters():
            if hasattr(parameter, "main_param"):
                parameter.main_param.data.copy_(parameter.detach())
