"""Random states of a resumed run: those of its checkpoint when the first step begins.

What lives here: undoing the draws of building data loaders. What may not: saving and loading states, which is
Megatron-Bridge's; states that do not fit the ranks (`checkpoint_manager.py`).
"""

from __future__ import annotations

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext


class UndisturbedGenerator(Callback):
    """torch draws a seed for each new loader from the global generator, after it was restored."""

    _state: torch.Tensor | None = None

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Save the state."""
        self._state = torch.get_rng_state()

    def on_train_start(self, context: CallbackContext) -> None:
        """Restore it."""
        if self._state is not None:  # a script with its own set-up does not call `on_data_init_start`
            torch.set_rng_state(self._state)
