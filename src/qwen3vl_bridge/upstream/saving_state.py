"""Copy the state of a run, to save a checkpoint with other settings than those of the run.

Set: private attributes of `GlobalState`. The public setter of its `cfg` would start signal handlers and the like again;
its experiment trackers have no setters. Delete this module when Megatron-Bridge can save a checkpoint
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
