"""Parts of the model that rest for the first steps of a run, in megatron-core's optimizer.

What lives here: keeping such parameters from being stepped, and starting Adam on them as new. What may not: which parts
and for how long (`tower_settings.py`).

A parameter without a gradient is not stepped: no moments, no weight decay, no share in the norm that clips. Adam's
correction of its moments' bias depends on how often it has stepped. Checkpoints of Megatron's have one such count for
all parameters; so between steps every count is that of the run's updates, and parts that began late have their own
only while the optimizer steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from qwen3vl_bridge.parallel.collectives import largest
from qwen3vl_bridge.training.optimizer.gradient_norms import optimizers_of
from qwen3vl_bridge.weights.model_parts import Part

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

# Below it 1 - x is 1: Adam no longer corrects anything.
_NOTHING = 2.0**-60


@dataclass
class _Late:
    """Parameters of one Adam that are first stepped after so many updates."""

    adam: torch.optim.Optimizer
    first: int
    parameters: list[Tensor]

    def has_settled(self, updates: int) -> bool:
        """Whether it no longer matters to Adam when these began."""
        betas = [beta for group in self.adam.param_groups for beta in group["betas"]]
        return updates > self.first and max(betas, default=0.0) ** (updates - self.first) < _NOTHING


class Rest:
    """Lets parts rest. Call `before` with gradients ready, then step, then call `after`.

    Args:
        optimizer: megatron-core's, resumed if it is to be.
        parts: of the tensors it steps.
        rests: parts that rest, and for how many updates of the run.
    """

    def __init__(self, optimizer: MegatronOptimizer, parts: dict[Tensor, Part], rests: dict[Part, int]) -> None:
        self._late: list[_Late] = []
        self._groups: dict[torch.optim.Optimizer, list[dict]] = {}
        if not rests:
            return
        adams = [one.optimizer for one in optimizers_of(optimizer)]
        self._updates = int(largest(max((_count(adam) for adam in adams), default=0)))
        for adam in adams:
            begin: dict[int, list[Tensor]] = defaultdict(list)
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                if first := rests.get(parts[parameter]):
                    begin[first].append(parameter)
            self._late += [_Late(adam, first, parameters) for first, parameters in begin.items()]

    def silence(self) -> None:
        """Take away the gradients of parts that rest."""
        for late in self._late:
            if self._updates < late.first:
                for parameter in late.parameters:
                    for name in ("grad", "decoupled_grad"):
                        if getattr(parameter, name, None) is not None:
                            setattr(parameter, name, None)

    def before(self) -> None:
        """Let parts that have begun late count steps from where they began."""
        begun = [late for late in self._late if self._updates >= late.first]
        for adam in {late.adam for late in begun}:
            firsts = {p: late.first for late in begun if late.adam is adam for p in late.parameters}
            self._groups[adam] = adam.param_groups
            adam.param_groups = [
                piece for group in adam.param_groups for piece in _pieces(group, firsts, self._updates)
            ]

    def after(self, *, updated: bool) -> None:
        """Let all count the run's updates again.

        Args:
            updated: whether the optimizer has stepped.
        """
        if not self._late:
            return
        self._updates += updated
        for adam, groups in self._groups.items():
            adam.param_groups = groups
            for group in groups:
                if group["params"]:
                    group["step"] = self._updates
        self._groups = {}
        self._late = [late for late in self._late if not late.has_settled(self._updates)]


def _pieces(group: dict, firsts: dict[Tensor, int], updates: int) -> list[dict]:
    """A parameter group, cut by when its parameters began."""
    pieces: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        pieces[firsts.get(parameter, 0)].append(parameter)
    return [{**group, "params": some, "step": updates - first} for first, some in pieces.items()]


def _count(adam: torch.optim.Optimizer) -> int:
    """The steps that an Adam has done."""
    return max((int(group["step"]) for group in adam.param_groups if "step" in group), default=0)
