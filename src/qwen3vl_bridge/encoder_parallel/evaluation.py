"""Evaluation of vision and language on ranks of their own, in Megatron-Bridge's loop.

What lives here: what its `evaluate` has to be given. What may not: how it comes to be given that (`compat/patches.py`),
the data of an evaluation (`encoder_batches.py`).

`evaluate` takes a communicator between modules. Megatron-Bridge's loop gives it none, and it would evaluate the module
of each rank alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from qwen3vl_bridge.models.common.provider import VisionLanguageProvider

from megatron.bridge.training.state import GlobalState
from megatron.core.process_groups_config import ProcessGroupCollection


def evaluate_modules_together(evaluate: Callable[..., Any], state: GlobalState, *args: Any, **kwargs: Any) -> Any:
    """Megatron-Bridge's `evaluate`, which evaluates the two modules as one model; of other runs as usual.

    Args:
        evaluate: Megatron-Bridge's.
        state: the run's.
        args, kwargs: other arguments of `evaluate`.
    """
    provider = state.cfg.model
    if isinstance(provider, VisionLanguageProvider) and provider.dist_train.use_dist_train:
        kwargs["p2p_communicator"] = provider._p2p_communicator
        kwargs["pg_collection"] = _groups_of_language(provider._pg_collection)
    return evaluate(state, *args, **kwargs)


def _groups_of_language(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """The same groups. Megatron-Bridge asks them for those of the language model, on ranks of the language model."""
    own = copy.copy(groups)
    own.get_language_model_collection = lambda: groups
    return own
