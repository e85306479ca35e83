"""Callbacks of a run in the small loop: Megatron-Bridge's, called where its own loop calls them.

What lives here: what each call is given, and what callbacks have measured. What may not: callbacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.training.monitoring.run_log import RunLog
from qwen3vl_bridge.training.monitoring.trackers import MEASURED, LoopContext

import torch
from megatron.bridge.training.callbacks import Callback, CallbackManager

if TYPE_CHECKING:
    from qwen3vl_bridge.training.small_loop.setup import Run


class Events:
    """Calls a run's callbacks.

    A callback may put figures into `context.user_state["measured"]`, which go into the log beside those of the loop
    (`trackers.publish` does so, and serves Megatron-Bridge's loop too); what it raises ends the run.
    """

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        self.run, self.manager = run, CallbackManager()
        self.manager.add(
            [callback for callback in callbacks if not isinstance(callback, RunLog)]
        )  # it has a log of its own

    def fire(self, event: str, **more: Any) -> None:
        """Call all that wait for an event.

        Args:
            event: of Megatron-Bridge's names.
            more: what a callback is given beside the run.
        """
        self.manager.user_state[MEASURED] = {}
        run = self.run
        context = LoopContext(
            run.state, run.model, self.manager.user_state, optimizer=run.optimizer, scheduler=run.scheduler, **more
        )
        self.manager.fire(event, context)

    def fire_step_end(self, entry: dict[str, float]) -> None:
        """Tell of a step, as the loop has logged it."""
        self.fire(
            "on_train_step_end",
            loss_dict={"lm loss": torch.tensor(entry["loss"])},
            grad_norm=entry["grad_norm"],
            skipped_iter="skipped" in entry,
        )

    @property
    def measured(self) -> dict[str, float]:
        """What callbacks measured at the latest event."""
        return self.manager.user_state.get(MEASURED, {})
