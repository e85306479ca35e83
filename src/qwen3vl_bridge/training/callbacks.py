"""What goes along with a run's steps, in Megatron-Bridge's loop and in ours.

What lives here: the list. What may not: what each of them does (its own file).
"""

from __future__ import annotations

from qwen3vl_bridge.training.before_step import BeforeStep

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import ConfigContainer


def training_callbacks(cfg: ConfigContainer) -> list[Callback]:
    """The callbacks that follow a configuration, for `finetune(cfg, forward_step, callbacks=training_callbacks(cfg))`.

    The small loop takes them by itself.

    Args:
        cfg: a recipe's configuration.
    """
    return [
        BeforeStep(),
    ]
