"""The gradients that a rank includes in a gradient norm.

Called: `MegatronOptimizer._filter_grads_for_norm`, which skips replicas on other ranks and finds the gradients of every
kind of optimizer. The public `get_grads_for_grad_norm` cannot select parameters: it returns all gradients.
Delete this module when megatron-core has a public method that can.
"""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


def gradients_for_norm(optimizer: MegatronOptimizer, parameters: list[Tensor]) -> list[Tensor]:
    """Return the gradients of these parameters that this rank includes in the optimizer's gradient norm."""
    return optimizer._filter_grads_for_norm(parameters)
