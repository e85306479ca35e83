"""The callbacks of a run.

What lives here: the list. What may not: the callbacks (each in its own file).
"""

from __future__ import annotations

from qwen3vl_bridge.dist_train.joint_step import Modules
from qwen3vl_bridge.training.accuracy import Accuracy
from qwen3vl_bridge.training.before_step import BeforeStep
from qwen3vl_bridge.training.checkpointing.saving_process import check_script
from qwen3vl_bridge.training.config import Qwen3VLConfigContainer
from qwen3vl_bridge.training.metrics import Metrics
from qwen3vl_bridge.training.random_states import UndisturbedGenerator
from qwen3vl_bridge.training.run_log import RunLog

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import ConfigContainer


def training_callbacks(cfg: ConfigContainer) -> list[Callback]:
    """The callbacks that implement a configuration, for `finetune(cfg, forward_step,
    callbacks=training_callbacks(cfg))`.

    Args:
        cfg: a recipe's configuration.

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
