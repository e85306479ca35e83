"""Delayed unfreezing: parts of the model that are frozen for the first steps of a run, in megatron-core's optimizer.

What lives here: excluding such parameters from a step, and starting Adam on them as new. What may not: which parts, and
for how long (`tower_settings.py`).

A parameter without a gradient is not stepped: no moments, no weight decay, no part in the norm for clipping. Adam's
bias correction of its moments depends on its number of steps. Megatron's checkpoints have one such number for all
parameters; so between steps every number is that of the run's updates, and parts that were unfrozen later have their
own only while the optimizer steps.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from qwen3vl_bridge.parallel.collectives import max_over_ranks
from qwen3vl_bridge.training.optimizer.gradient_norms import optimizers_of
from qwen3vl_bridge.weights.model_parts import Part

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

# Below it 1 - x is 1: Adam no longer corrects anything.
_NEGLIGIBLE = 2.0**-60


@dataclass
class _Delayed:
    """Parameters of one Adam that are first stepped after `first` updates."""

    adam: torch.optim.Optimizer
    first: int
    parameters: list[Tensor]

    def has_settled(self, updates: int) -> bool:
        """Whether Adam's bias correction no longer depends on their first update."""
        betas = [beta for group in self.adam.param_groups for beta in group["betas"]]
        return updates > self.first and max(betas, default=0.0) ** (updates - self.first) < _NEGLIGIBLE


class DelayedUnfreezing:
    """Freezes parts for a run's first updates. Call `before` with gradients ready, then step, then call `after`.

    Args:
        optimizer: megatron-core's, after its state was loaded.
        parts: of the tensors it steps.
        frozen: the number of updates of the run for which each part is frozen.
    """

    def __init__(self, optimizer: MegatronOptimizer, parts: dict[Tensor, Part], frozen: dict[Part, int]) -> None:
        self._delayed: list[_Delayed] = []
        self._groups: dict[torch.optim.Optimizer, list[dict]] = {}
        if not frozen:
            return
        adams = [one.optimizer for one in optimizers_of(optimizer)]
        self._updates = int(max_over_ranks(max((_count(adam) for adam in adams), default=0)))
        for adam in adams:
            begin: dict[int, list[Tensor]] = defaultdict(list)
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                if first := frozen.get(parts[parameter]):
                    begin[first].append(parameter)
            self._delayed += [_Delayed(adam, first, parameters) for first, parameters in begin.items()]

    def drop_frozen_gradients(self) -> None:
        """Set the gradients of frozen parts to None, with which megatron-core steps no parameter."""
        frozen = [p for delayed in self._delayed if self._updates < delayed.first for p in delayed.parameters]
        for parameter, name in itertools.product(frozen, ("grad", "decoupled_grad")):
            if getattr(parameter, name, None) is not None:
                setattr(parameter, name, None)

    def before(self) -> None:
        """Make Adam count the steps of unfrozen parts from their first update."""
        unfrozen = [delayed for delayed in self._delayed if self._updates >= delayed.first]
        for adam in {delayed.adam for delayed in unfrozen}:
            firsts = {p: one.first for one in unfrozen if one.adam is adam for p in one.parameters}
            self._groups[adam] = adam.param_groups
            adam.param_groups = [
                piece for group in adam.param_groups for piece in _pieces(group, firsts, self._updates)
            ]

    def after(self, *, updated: bool) -> None:
        """Make Adam count the run's updates for all parameters again.

        Args:
            updated: whether the optimizer has stepped.
        """
        if not self._delayed:
            return
        self._updates += updated
        for adam, groups in self._groups.items():
            adam.param_groups = groups
            for group in groups:
                if group["params"]:
                    group["step"] = self._updates
        self._groups = {}
        self._delayed = [delayed for delayed in self._delayed if not delayed.has_settled(self._updates)]


def _pieces(group: dict, firsts: dict[Tensor, int], updates: int) -> list[dict]:
    """A parameter group, divided by the updates after which its parameters are first stepped."""
    pieces: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        pieces[firsts.get(parameter, 0)].append(parameter)
    return [{**group, "params": some, "step": updates - first} for first, some in pieces.items()]


def _count(adam: torch.optim.Optimizer) -> int:
    """Number of steps of an Adam."""
    return max((int(group["step"]) for group in adam.param_groups if "step" in group), default=0)
