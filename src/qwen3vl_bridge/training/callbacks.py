"""The callbacks of a run, in the order in which Megatron-Bridge's loop calls them."""

from __future__ import annotations

from qwen3vl_bridge.dist_train.joint_step import Modules
from qwen3vl_bridge.training.accuracy import Accuracy
from qwen3vl_bridge.training.before_step import BeforeStep
from qwen3vl_bridge.training.checkpoint_manager import check_script
from qwen3vl_bridge.training.config import Qwen3VLConfigContainer
from qwen3vl_bridge.training.metrics import Metrics
from qwen3vl_bridge.training.run_log import RunLog

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer


def training_callbacks(cfg: ConfigContainer) -> list[Callback]:
    """The callbacks that implement a configuration: `finetune(cfg, forward_step, callbacks=training_callbacks(cfg))`.

    Raises:
        ValueError: a configuration that cannot be implemented.
        RuntimeError: this is a process that saving has started, which runs the script again.
    """
    check_script()
    callbacks: list[Callback] = [BeforeStep()]  # its norms are in the metrics
    if cfg.model.dist_train.use_dist_train:
        callbacks.append(Modules())
    if not cfg.logger.skip_train_metrics_log:
        callbacks.append(Metrics(cfg))
    if isinstance(cfg, Qwen3VLConfigContainer) and cfg.accuracy.path is not None:
        callbacks.append(Accuracy(cfg))
    if cfg.train.num_epochs is None:  # Megatron-Bridge refuses it with callbacks of its kind
        callbacks.append(UndisturbedGenerator())
    return [*callbacks, RunLog()]


class UndisturbedGenerator(Callback):
    """Keeps the restored random state of a resumed run: torch draws a seed for each new data loader after that."""

    _state: torch.Tensor | None = None

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Save the state."""
        self._state = torch.get_rng_state()

    def on_train_start(self, context: CallbackContext) -> None:
        """Restore it."""
        if self._state is not None:  # a script with its own set-up does not call `on_data_init_start`
            torch.set_rng_state(self._state)
