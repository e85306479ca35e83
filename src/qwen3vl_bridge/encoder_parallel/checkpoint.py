"""Checkpoints of runs with separate vision ranks, in Megatron-Bridge's loop: they equal those of one model.

What lives here: what its own saving and loading are told, so that nothing of both modules has the same name and a run
continues with another number of ranks, or without modules. What may not: where a
run's checkpoints are saved and found (`training/checkpoint_manager.py`).

Tensors of both modules have names of their own, and the rest is what the first rank has. Two things are not so. Random
states are stored by a rank's place in its module; the tower's get a name of their own. And an optimizer that has no
parameters, as that of experts on ranks of the tower, cannot describe itself; the other module does that for it.
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
    """Let what a rank saves or loads be its part of a complete model's; as it is where there are no modules.

    Args:
        ctx: Megatron-Bridge's, of this rank's module.

    Yields:
        What Megatron-Bridge's own manager is to be given.
    """
    provider = ctx.state.cfg.model
    if not provider.dist_train.use_dist_train:
        yield ctx
        return
    with _described_as_one(ctx.optimizer, provider):
        yield ctx if provider.add_decoder else dataclasses.replace(ctx, module_name=_VISION)


@contextlib.contextmanager
def _described_as_one(optimizer: MegatronOptimizer | None, provider: VisionLanguageProvider) -> Iterator[None]:
    """An optimizer that describes itself as the whole model's does, as far as that is of this rank."""
    if optimizer is None:
        yield
        return
    described = _Described(optimizer, provider)
    instead = {
        "sharded_state_dict": described.sharded_state_dict,
        "load_state_dict": described.load_state_dict,
        "is_stub_optimizer": False,  # Megatron-Bridge passes by one that has no parameters at all
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
    """The optimizer of one module's ranks: those of its chain that have parameters describe themselves.

    What there is beside tensors, such as steps, is put together from both modules, so that it is the same on every rank
    and says as much as a complete model's.

    Args:
        optimizer: megatron-core's; every rank makes this at the same time.
        provider: the run's.
    """

    def __init__(self, optimizer: MegatronOptimizer, provider: VisionLanguageProvider) -> None:
        self._chain = getattr(optimizer, "chained_optimizers", [optimizer])
        self._first_language = provider.dist_train.vision_world_size
        here = {i for i, one in enumerate(self._chain) if any(group["params"] for group in one.param_groups)}
        # A distributed optimizer's share of them may have none of what its module has.
        heard = gather_objects((provider.add_decoder, here))
        self._own = sorted(set().union(*(there for module, there in heard if module == provider.add_decoder)))

    def sharded_state_dict(self, model: ShardedStateDict, is_loading: bool = False, **kwargs: Any) -> ShardedStateDict:
        """By number in the chain, unless it is one; every rank calls this."""
        own = {i: self._chain[i].sharded_state_dict(model, is_loading, **kwargs) for i in self._own}
        if is_loading:
            return self._unless_one(own)
        _, lasting = extract_nonpersistent(own)
        sharded, common = extract_sharded_base(lasting)
        common = _over(broadcast_object(common), broadcast_object(common, self._first_language))
        return self._unless_one(_over(common, sharded))

    def load_state_dict(self, state: dict) -> None:
        """Its own part of the whole model's.

        Args:
            state: as it was described.
        """
        for i in self._own:
            self._chain[i].load_state_dict(state[i] if len(self._chain) > 1 else state)

    def _unless_one(self, by_number: dict[int, Any]) -> dict:
        return by_number if len(self._chain) > 1 else by_number.get(0, {})


def _over(below: Any, above: Any) -> Any:
    """Two nested structures of one form as one; what is in both is of the one above."""
    if isinstance(below, list) and isinstance(above, list) and len(below) == len(above):
        return [_over(*both) for both in zip(below, above, strict=True)]
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _over(below[key], value) if key in below else value for key, value in above.items()}
