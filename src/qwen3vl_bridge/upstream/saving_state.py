"""A copy of the state of a run whose checkpoint is saved by other settings.

Borrowed: private attributes of `GlobalState`. The setter of its `cfg` starts what depends on settings again, such as
signal handlers; its experiment trackers have no setters. Delete this module when Megatron-Bridge can save a checkpoint
into another folder than the run's, without removing older ones and telling trackers.
"""

from __future__ import annotations

import copy

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import GlobalState

# Experiment trackers of a state, and the setting without which it creates none.
_TRACKERS = {
    "_wandb_logger": "wandb_project",
    "_mlflow_logger": "mlflow_experiment",
    "_comet_logger": "comet_project",
}


def copy_without_trackers(state: GlobalState, cfg: ConfigContainer) -> GlobalState:
    """Return a shallow copy of a state with another configuration, and without experiment trackers.

    `cfg.logger` is changed in place.
    """
    state = copy.copy(state)
    for name, setting in _TRACKERS.items():
        setattr(state, name, None)
        setattr(cfg.logger, setting, None)
    state._cfg = cfg
    return state
