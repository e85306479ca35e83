"""Checkpoints of vision and language on ranks of their own, in Megatron-Bridge's loop: those of one model.

What lives here: what its own saving and loading are told, so that nothing of both modules has the same name and a run
goes on with another number of ranks, or without modules. What may not: checkpoints of the small loop (`checkpoint.py`).

Tensors of both modules have names of their own, and the rest is what the first rank has. Two things are not so. Random
states are stored by a rank's place in its module; the tower's get a name of their own. And an optimizer of the tower's
ranks that has no parameters, as that of experts, cannot describe itself; it is described as the language model's is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.megatron_folder import find_iteration
from qwen3vl_bridge.parallel import tell_all
from qwen3vl_bridge.provider import Qwen3VLModelProvider

from megatron.bridge.training.checkpointing import CheckpointLoadContext, CheckpointSaveContext
from megatron.bridge.training.config import CheckpointConfig
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import extract_nonpersistent, extract_sharded_base
from megatron.core.optimizer import MegatronOptimizer

_VISION = "vision_model"


@contextlib.contextmanager
def as_one_model[Context: (CheckpointSaveContext, CheckpointLoadContext)](ctx: Context) -> Iterator[Context]:
    """Let what a rank saves or loads be its part of a whole model's; as it is where there are no modules.

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
def random_states_of_module(settings: CheckpointConfig, provider: Qwen3VLModelProvider) -> Iterator[None]:
    """Load random states where a checkpoint has those of a tower that is split as this rank's; the tower draws none.

    Args:
        settings: changed in place for a while.
        provider: the run's.
    """
    given = settings.load_rng
    if provider.dist_train.use_dist_train and not provider.add_decoder:
        settings.load_rng = given and _has_random_states(settings, provider)
    try:
        yield
    finally:
        settings.load_rng = given


def _has_random_states(settings: CheckpointConfig, provider: Qwen3VLModelProvider) -> bool:
    tensor = provider._pg_collection.tp
    metadata = read_metadata(find_iteration(Path(settings.load), settings.ckpt_step))
    return f"rng_state.{_VISION}/shard_0.{tensor.rank()}_1.{tensor.size()}" in metadata.byte_items


@contextlib.contextmanager
def _described_as_one(optimizer: MegatronOptimizer | None, provider: Qwen3VLModelProvider) -> Iterator[None]:
    """An optimizer that describes itself as the whole model's does, as far as that is of this rank."""
    if optimizer is None:
        yield
        return
    described = (_Language if provider.add_decoder else _Vision)(optimizer, provider.dist_train.vision_world_size)
    instead: dict[str, Any] = {"sharded_state_dict": described.sharded_state_dict}
    if isinstance(described, _Vision):
        # Megatron-Bridge passes by an optimizer that has no parameters at all.
        instead |= {"load_state_dict": described.load_state_dict, "is_stub_optimizer": False}
    before = dict(vars(optimizer))
    vars(optimizer).update(instead)
    try:
        yield
    finally:
        for name in instead:
            vars(optimizer).pop(name)
            if name in before:
                vars(optimizer)[name] = before[name]


class _Language:
    """A language rank's optimizer, which tells the tower's ranks what there is beside tensors.

    Args:
        optimizer: megatron-core's.
        first: the first language rank.
    """

    def __init__(self, optimizer: MegatronOptimizer, first: int) -> None:
        self._describe, self._first = optimizer.sharded_state_dict, first

    def sharded_state_dict(self, model: ShardedStateDict, is_loading: bool = False, **kwargs: Any) -> ShardedStateDict:
        """Its own; every rank calls this where it is to be saved."""
        description = self._describe(model, is_loading, **kwargs)
        if not is_loading:
            _, lasting = extract_nonpersistent(description)
            _, common = extract_sharded_base(lasting)
            tell_all(common, self._first)
        return description


class _Vision:
    """The optimizer of one of the tower's ranks: as many as the language model has, with those that it has not itself.

    Args:
        optimizer: megatron-core's.
        first: the first language rank.
    """

    def __init__(self, optimizer: MegatronOptimizer, first: int) -> None:
        self._chain, self._first = getattr(optimizer, "chained_optimizers", [optimizer]), first

    @property
    def _own(self) -> dict[int, MegatronOptimizer]:
        """Those of the chain that have parameters."""
        return {i: one for i, one in enumerate(self._chain) if any(group["params"] for group in one.param_groups)}

    def sharded_state_dict(self, model: ShardedStateDict, is_loading: bool = False, **kwargs: Any) -> ShardedStateDict:
        """Its own, and what it is told of the others; every rank calls this where it is to be saved."""
        own = {i: one.sharded_state_dict(model, is_loading, **kwargs) for i, one in self._own.items()}
        if is_loading:
            return own if len(self._chain) > 1 else own.get(0, {})
        told = tell_all(None, self._first)
        return told | own if 0 in told else own.get(0, told)

    def load_state_dict(self, state: dict) -> None:
        """Its own part of the whole model's.

        Args:
            state: as it was described.
        """
        for i, one in self._own.items():
            one.load_state_dict(state[i] if len(self._chain) > 1 else state)
