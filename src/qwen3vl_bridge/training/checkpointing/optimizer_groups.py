"""An optimizer's settings in Megatron-Bridge's loop, from a checkpoint in which experts had a separate optimizer.

What lives here: conversion between both forms. What may not: tensors, which have the parameters' names and are read in
either form.

Only under expert parallelism, megatron-core puts experts' parameters into separate groups with a separate optimizer. A
checkpoint then has the settings of groups (rates, decay, steps) by the optimizer's index, and otherwise without an
index, so that a run with experts could not resume from one form in the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

_GROUPS, _OF_EXPERTS = "param_groups", "is_expert_parallel"
_SAME = tuple(key for key in param_group_identifier_keys if key != _OF_EXPERTS)


@contextlib.contextmanager
def loads_either_form(optimizer: MegatronOptimizer | None) -> Iterator[None]:
    """Let an optimizer load what was saved with another number of optimizers in its chain.

    Args:
        optimizer: megatron-core's; changed temporarily.
    """
    if optimizer is None:
        yield
        return
    before, load = vars(optimizer).get("load_state_dict"), optimizer.load_state_dict

    def load_state_dict(state: dict) -> None:
        chain = getattr(optimizer, "chained_optimizers", [optimizer])
        if "param_groups" in state and not any(group["params"] for one in chain for group in one.param_groups):
            # All of this stage is frozen: a checkpoint stores nothing for an empty state, and megatron-core asks for
            # it.
            state = {"state": {}, **state}
        load(in_own_form(state, chain))

    optimizer.load_state_dict = load_state_dict
    try:
        yield
    finally:
        del optimizer.load_state_dict
        if before is not None:
            optimizer.load_state_dict = before


def in_own_form(state: dict, chain: Sequence[MegatronOptimizer]) -> dict:
    """The loaded state of an optimizer, with settings where it looks for them.

    Args:
        state: tensors in the chain's own form, by index in a chain of several. In addition, settings as they were
            saved: by index too if there were several optimizers, and only then.
        chain: the optimizers.

    Returns:
        The unchanged state if both forms are the same.
    """
    numbered = {key: value for key, value in state.items() if isinstance(key, int)}
    whole = {key: value for key, value in state.items() if key not in numbered}
    if not (numbered and whole):
        return state
    if len(chain) == 1:
        return _with_settings(whole, list(numbered.values()), chain[0].param_groups)
    return {i: _with_settings(own, [whole], chain[i].param_groups) for i, own in numbered.items()}


def _with_settings(own: Mapping, saved: list[dict], groups: list[dict]) -> dict:
    """An optimizer's own state, with missing values from the first one that has them; groups from all."""
    found = dict(own)
    for key in {key: None for settings in saved for key in settings}:
        theirs = [settings[key] for settings in saved if key in settings]
        if key == _GROUPS:
            places = own.get(key) or [{} for _ in groups]
            stored = [group for several in theirs for group in several]
            found[key] = [_group_of(group, stored) | place for group, place in zip(groups, places, strict=True)]
        elif isinstance(theirs[0], dict):
            found[key] = _with_settings(own.get(key, {}), theirs, groups)
        else:
            found.setdefault(key, theirs[0])
    return found


def _group_of(group: dict, stored: list[dict]) -> dict[str, Any]:
    """The settings that were saved for a group; empty if there are none, which megatron-core refuses."""
    found = next((other for other in stored if _identity(other) == _identity(group)), None)
    return {} if found is None else found | {_OF_EXPERTS: group[_OF_EXPERTS]}


def _identity(group: Mapping) -> tuple:
    """The values by which megatron-core identifies groups, except whether it has experts."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _SAME)
