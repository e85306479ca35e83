"""Evaluation with separate vision ranks, in Megatron-Bridge's loop.

What lives here: the arguments of its `evaluate`. What may not: how they are passed (`compat/patches.py`), the data of
an evaluation (`encoder_batches.py`).

`evaluate` takes a communicator between modules. Megatron-Bridge's loop passes none, and would evaluate the module of
each rank by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from qwen3vl_bridge.models.common.provider import VisionLanguageProvider

from megatron.bridge.training.state import GlobalState
from megatron.core.process_groups_config import ProcessGroupCollection


def evaluate_both_modules(evaluate: Callable[..., Any], state: GlobalState, *args: Any, **kwargs: Any) -> Any:
    """Call Megatron-Bridge's `evaluate` such that it evaluates the two modules as one model; unchanged for other runs.

    Args:
        evaluate: Megatron-Bridge's function.
        state: the run's global state.
        args, kwargs: other arguments of `evaluate`.
    """
    provider = state.cfg.model
    if isinstance(provider, VisionLanguageProvider) and provider.dist_train.use_dist_train:
        kwargs["p2p_communicator"] = provider._p2p_communicator
        kwargs["pg_collection"] = _groups_of_language(provider._pg_collection)
    return evaluate(state, *args, **kwargs)


def _groups_of_language(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """The same groups. On language ranks Megatron-Bridge asks them for the language model's groups."""
    own = copy.copy(groups)
    own.get_language_model_collection = lambda: groups
    return own
