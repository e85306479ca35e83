"""TensorBoard and Weights & Biases, as set in Megatron-Bridge's configuration.

What lives here: where metrics are written. What may not: the metrics (`metrics.py`), the log (`run_log.py`), creating
the two (Megatron-Bridge's state does, on the last rank).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from megatron.bridge.training.callbacks import CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import GlobalState

# Prefix of metrics that Megatron-Bridge does not log itself.
PREFIX = "qwen3vl/"
# Key of an event's metrics until they are in the log, in `context.user_state`.
MEASURED = "measured"


def check_trackers(cfg: ConfigContainer) -> None:
    """Refuse, before training, a tracker that would fail at the first metric.

    Raises:
        ValueError: Weights & Biases is requested and not installed, or would refuse the name.
    """
    settings = cfg.logger
    if not settings.wandb_project:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"logger.wandb_project is {settings.wandb_project!r}, and wandb is not installed: install it (pip install "
            "wandb), or set logger.wandb_project=None"
        )
    if settings.wandb_exp_name == "":
        raise ValueError("logger.wandb_exp_name is '', expected a name for the run, or None")


def publish(context: CallbackContext, figures: Mapping[str, float]) -> None:
    """Pass a callback's metrics to the log and the trackers.

    Args:
        context: of the event. Every rank may call it; one of them writes.
        figures: metrics by name.
    """
    context.user_state.setdefault(MEASURED, {}).update(figures)
    _write(context.state, {PREFIX + name: value for name, value in figures.items()}, step_of(context))


def step_of(context: CallbackContext) -> int:
    """The latest finished step. Megatron-Bridge's event comes before it counts the step."""
    return context.state.train_state.step + (context.loss_dict is not None)


def _write(state: GlobalState, figures: Mapping[str, float], step: int) -> None:
    """Write metrics under these names, on the rank that has a tracker."""
    if (board := state.tensorboard_logger) is not None:
        for name, value in figures.items():
            board.add_scalar(name, value, step)
    if (wandb := state.wandb_logger) is not None:
        wandb.log(dict(figures), step)
