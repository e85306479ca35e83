"""Gradient norms of the model's parts, from megatron-core's optimizers right before a step.

What lives here: the part of each parameter that an optimizer steps, and the squares of the parts' gradients. What may
not: decisions based on them (`step_guard.py`).

An optimizer steps parameters of the model, float32 copies of them, or, if it is distributed, this rank's piece of
either. megatron-core provides which of them are replicated on other ranks, and over which ranks squares are summed.
"""

from __future__ import annotations

from collections.abc import Iterator

from qwen3vl_bridge.weights.model_parts import Part, part_of_wrapped

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers in a chain, without those that have no parameters."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in every if not getattr(one, "is_stub_optimizer", False)]


def parts_of_parameters(model: list[torch.nn.Module], optimizer: MegatronOptimizer) -> dict[Tensor, Part]:
    """The part of each tensor that an optimizer steps.

    Args:
        model: this rank's chunks, as the optimizer was given them.
        optimizer: megatron-core's.

    Raises:
        ValueError: it steps a tensor that is not found in the model.
    """
    named = [(part_of_wrapped(name), p) for chunk in model for name, p in chunk.named_parameters()]
    found = {}
    for one in optimizers_of(optimizer):
        stepped = set(one.get_parameters())
        for part, parameter in named:
            found |= {tensor: part for tensor in _stepped_for(one, parameter) if tensor in stepped}
        if missing := stepped - found.keys():
            raise ValueError(
                f"the optimizer updates {len(missing)} tensors that belong to no parameter of the model, "
                f"expected none: found shapes {sorted({tuple(tensor.shape) for tensor in missing})[:8]}"
            )
    return found


def _stepped_for(one: MegatronOptimizer, parameter: Tensor) -> Iterator[Tensor]:
    """The tensors that an optimizer may step to change a parameter."""
    yield parameter
    if getattr(parameter, "main_param", None) is not None:
        yield parameter.main_param
    pieces = getattr(one, "model_param_group_index_map", {})
    if parameter in pieces:
        group, place = pieces[parameter]
        yield one.param_groups[group]["params"][place]


class PartSquares:
    """Squares of the parts' gradient norms.

    Args:
        optimizer: megatron-core's.
        parts: of the tensors it steps.
        groups: process groups.
    """

    def __init__(self, optimizer: MegatronOptimizer, parts: dict[Tensor, Part], groups: ProcessGroupCollection) -> None:
        ranks = groups.tp_dp_cp.size() * groups.pp.size()  # ranks of the parts: all, or those of one module
        self._sums = []
        for one in optimizers_of(optimizer):
            group = one.get_grad_stats_parallel_group()
            # Every such group computes the same sum; a sum over all ranks of the parts counts it once for each group.
            share = 1.0 if group is None else group.size() / ranks
            stepped = one.get_parameters()
            self._sums.append((one, share, [[p for p in stepped if parts[p] is part] for part in Part]))

    @torch.no_grad()
    def of_this_rank(self) -> Tensor:
        """[parts] float64, on the gradients' device: their sum over all ranks is the squares of the parts' norms.

        Gradients must be where the optimizer reads them.
        """
        totals = []
        for one, share, by_part in self._sums:
            # Skips replicas on other ranks, and finds the gradients of every kind of optimizer.
            gradients = [one._filter_grads_for_norm(parameters) for parameters in by_part]
            norms = [torch.nn.utils.get_total_norm(some) if some else None for some in gradients]
            if known := [norm for norm in norms if norm is not None]:
                zero = torch.zeros_like(known[0])
                squares = torch.stack([zero if norm is None else norm for norm in norms]).double().square()
                totals.append(share * squares)
        return torch.stack(totals).sum(0) if totals else torch.zeros(len(Part), dtype=torch.float64)
