"""Checkpoints of runs with separate vision ranks, in Megatron-Bridge's loop: they equal those of one model.

What lives here: the arguments of Megatron-Bridge's saving and loading, such that names are unique over both modules and
a run can continue with another number of ranks, or without modules. What may not: where a run's checkpoints are saved
and found (`training/checkpoint_manager.py`).

Tensors of the two modules have different names, and other state is taken from the first rank. There are two exceptions.
Random states are stored by a rank's index in its module; the tower's get a separate name. And an optimizer without
parameters, such as that of experts on vision ranks, has no state dict; that of the other module is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.parallel.collectives import broadcast_object, gather_objects

from megatron.bridge.training.checkpointing import CheckpointLoadContext, CheckpointSaveContext
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import extract_nonpersistent, extract_sharded_base
from megatron.core.optimizer import MegatronOptimizer

_VISION = "vision_model"


@contextlib.contextmanager
def as_one_model[Context: (CheckpointSaveContext, CheckpointLoadContext)](ctx: Context) -> Iterator[Context]:
    """Make what a rank saves or loads its part of a complete model's checkpoint; unchanged without modules.

    Args:
        ctx: Megatron-Bridge's, of this rank's module.

    Yields:
        The context for Megatron-Bridge's own manager.
    """
    provider = ctx.state.cfg.model
    if not provider.dist_train.use_dist_train:
        yield ctx
        return
    with _described_as_one(ctx.optimizer, provider):
        yield ctx if provider.add_decoder else dataclasses.replace(ctx, module_name=_VISION)


@contextlib.contextmanager
def _described_as_one(optimizer: MegatronOptimizer | None, provider: VisionLanguageProvider) -> Iterator[None]:
    """An optimizer whose sharded state dict is this rank's part of the whole model's."""
    if optimizer is None:
        yield
        return
    described = _Described(optimizer, provider)
    instead = {
        "sharded_state_dict": described.sharded_state_dict,
        "load_state_dict": described.load_state_dict,
        "is_stub_optimizer": False,  # Megatron-Bridge skips an optimizer without any parameters
    }
    before = dict(vars(optimizer))
    vars(optimizer).update(instead)
    try:
        yield
    finally:
        for name in instead:
            vars(optimizer).pop(name)
            if name in before:
                vars(optimizer)[name] = before[name]


class _Described:
    """The optimizer of one module's ranks: state dicts of the optimizers in its chain that have parameters.

    State other than tensors, such as steps, is merged from both modules, so that it is equal on every rank and as
    complete as a whole model's.

    Args:
        optimizer: megatron-core's; every rank creates this at the same time.
        provider: the run's.
    """

    def __init__(self, optimizer: MegatronOptimizer, provider: VisionLanguageProvider) -> None:
        self._chain = getattr(optimizer, "chained_optimizers", [optimizer])
        self._first_language = provider.dist_train.vision_world_size
        here = {i for i, one in enumerate(self._chain) if any(group["params"] for group in one.param_groups)}
        # A rank's part of a distributed optimizer may lack parameters that its module has.
        heard = gather_objects((provider.add_decoder, here))
        self._own = sorted(set().union(*(there for module, there in heard if module == provider.add_decoder)))

    def sharded_state_dict(self, model: ShardedStateDict, is_loading: bool = False, **kwargs: Any) -> ShardedStateDict:
        """By index in the chain, unless it has only one optimizer; a collective call."""
        own = {i: self._chain[i].sharded_state_dict(model, is_loading, **kwargs) for i in self._own}
        if is_loading:
            return self._unless_one(own)
        _, lasting = extract_nonpersistent(own)
        sharded, common = extract_sharded_base(lasting)
        common = _over(broadcast_object(common), broadcast_object(common, self._first_language))
        return self._unless_one(_over(common, sharded))

    def load_state_dict(self, state: dict) -> None:
        """Load this rank's part of the whole model's state.

        Args:
            state: with the structure of `sharded_state_dict`.
        """
        for i in self._own:
            self._chain[i].load_state_dict(state[i] if len(self._chain) > 1 else state)

    def _unless_one(self, by_number: dict[int, Any]) -> dict:
        return by_number if len(self._chain) > 1 else by_number.get(0, {})


def _over(below: Any, above: Any) -> Any:
    """Merge two nested structures; for entries in both, the value of `above` is used."""
    if isinstance(below, list) and isinstance(above, list) and len(below) == len(above):
        return [_over(*both) for both in zip(below, above, strict=True)]
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _over(below[key], value) if key in below else value for key, value in above.items()}
