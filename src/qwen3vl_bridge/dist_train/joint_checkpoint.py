"""Checkpoints of runs with separate vision ranks, in Megatron-Bridge's loop: they equal those of one model.

Names of tensors are unique over both modules, so a run can continue with another number of ranks, or without modules.
Other state is taken from the first rank, with two exceptions. Random states are stored by a rank's index in its module;
the tower's get a separate name. And an optimizer without parameters, such as that of experts on vision ranks, has no
state dict; that of the other module is used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.parallel.collectives import broadcast_object, gather_objects

from megatron.bridge.training.checkpointing import CheckpointLoadContext, CheckpointSaveContext
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import extract_nonpersistent, extract_sharded_base
from megatron.core.optimizer import MegatronOptimizer

_VISION = "vision_model"


def as_one_model[Context: (CheckpointSaveContext, CheckpointLoadContext)](ctx: Context) -> Context:
    """Megatron-Bridge's context of a rank's module, whose part of a complete model's checkpoint it saves or loads."""
    provider, changes = ctx.state.cfg.model, {} if ctx.state.cfg.model.add_decoder else {"module_name": _VISION}
    if ctx.optimizer is not None:
        changes["optimizer"] = _JointOptimizer(ctx.optimizer, provider)
    return dataclasses.replace(ctx, **changes)


class _JointOptimizer:
    """The optimizer of one module's ranks: state dicts of the optimizers in its chain that have parameters. State other
    than tensors, such as steps, is merged from both modules. Every rank creates this at the same time.
    """

    is_stub_optimizer = False  # Megatron-Bridge skips an optimizer without any parameters

    def __init__(self, optimizer: MegatronOptimizer, provider: VisionLanguageProvider) -> None:
        self._optimizer = optimizer
        self._chain = getattr(optimizer, "chained_optimizers", [optimizer])
        self._first_language = provider.dist_train.vision_world_size
        here = {i for i, part in enumerate(self._chain) if any(group["params"] for group in part.param_groups)}
        # A rank's part of a distributed optimizer may lack parameters that its module has.
        heard = gather_objects((provider.add_decoder, here))
        self._own = sorted(set().union(*(there for module, there in heard if module == provider.add_decoder)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def sharded_state_dict(self, model: ShardedStateDict, is_loading: bool = False, **kwargs: Any) -> ShardedStateDict:
        """By index in the chain, unless it has only one optimizer; a collective call."""
        own = {i: self._chain[i].sharded_state_dict(model, is_loading, **kwargs) for i in self._own}
        if not is_loading:
            _, lasting = extract_nonpersistent(own)
            sharded, common = extract_sharded_base(lasting)
            common = _merged(broadcast_object(common), broadcast_object(common, self._first_language))
            own = _merged(common, sharded)
        return own if len(self._chain) > 1 else own.get(0, {})

    def load_state_dict(self, state: dict) -> None:
        """Load this rank's part of the whole model's state, which has the structure of `sharded_state_dict`."""
        for i in self._own:
            self._chain[i].load_state_dict(state[i] if len(self._chain) > 1 else state)


def _merged(below: Any, above: Any) -> Any:
    """Two nested structures as one; for entries in both, the value of `above` is used."""
    if isinstance(below, list) and isinstance(above, list) and len(below) == len(above):
        return [_merged(*both) for both in zip(below, above, strict=True)]
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below[key], value) if key in below else value for key, value in above.items()}
