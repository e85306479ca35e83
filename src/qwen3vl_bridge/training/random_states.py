"""Random states of a run that is resumed: they are those of its checkpoint when the first step begins.

What lives here: what building data loaders draws, taken back. What may not: saving and loading states, which is
Megatron-Bridge's; where they don't fit the ranks (`checkpoint_manager.py`).
"""

from __future__ import annotations

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext


class UndisturbedGenerator(Callback):
    """torch draws a seed for each loader that is begun, from the global generator, after it was restored."""

    _state: torch.Tensor | None = None

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Remember the state."""
        self._state = torch.get_rng_state()

    def on_train_start(self, context: CallbackContext) -> None:
        """Give it back."""
        if self._state is not None:  # a script with a set-up of its own tells of no data
            torch.set_rng_state(self._state)
