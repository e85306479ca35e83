"""Evaluation with a communicator between a vision tower and a language model on separate ranks.

Replaced: `megatron.bridge.training.eval.evaluate`, in processes of such a run. Megatron-Bridge's loop calls it without
the arguments for the communicator and the process groups, so each rank would evaluate its module by itself. Delete this
module when the loop passes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from qwen3vl_bridge.upstream.replacements import When, replace

from megatron.bridge.training import eval as evaluation
from megatron.bridge.training.state import GlobalState

_MARK = "qwen3vl_bridge_adds_arguments"


def add_arguments_of_evaluation(arguments_of: Callable[[GlobalState], Mapping[str, Any]]) -> None:
    """Make evaluations in this process call `evaluate` with the additional arguments that `arguments_of` returns.

    Repeated calls have no effect.
    """
    theirs = evaluation.evaluate
    if hasattr(theirs, _MARK):
        return

    @functools.wraps(theirs)
    def evaluate(state: GlobalState, *args: Any, **kwargs: Any) -> Any:
        return theirs(state, *args, **kwargs | arguments_of(state))

    setattr(evaluate, _MARK, True)
    replace(evaluation, "evaluate", evaluate, When.DIST_TRAIN)
