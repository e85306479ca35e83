"""The copy of a run's state for a save."""

from types import SimpleNamespace

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("saving_state")
STATE, CONFIG = "megatron.bridge.training.state", "megatron.bridge.training.config"
LOGGERS = {"wandb_logger": "wandb_project", "mlflow_logger": "mlflow_experiment", "comet_logger": "comet_project"}


def test_global_state_has_private_config_and_loggers():
    CONTRACT.mentions(STATE, "GlobalState.__init__", "_cfg", *(f"_{name}" for name in LOGGERS))
    for name in LOGGERS:
        CONTRACT.find(STATE, f"GlobalState.{name}", property)
    for setting in LOGGERS.values():
        CONTRACT.find(CONFIG, f"LoggerConfig.{setting}")


def test_copy_without_trackers_clears_loggers_of_copy_only():
    CONTRACT.find(STATE, "GlobalState")
    from qwen3vl_bridge.upstream.saving_state import copy_without_trackers

    from megatron.bridge.training.config import LoggerConfig
    from megatron.bridge.training.state import GlobalState

    state, trackers = GlobalState(), {f"_{name}": object() for name in LOGGERS}
    vars(state).update(trackers)
    cfg = SimpleNamespace(logger=LoggerConfig(wandb_project="mine"))
    copied = copy_without_trackers(state, cfg)
    found = [copied.cfg is cfg, *(getattr(copied, name) is None for name in LOGGERS)]
    if not all(found):
        CONTRACT.fail(STATE, f"the copy has its configuration and no {', '.join(LOGGERS)}: {found}")
    assert state.cfg is None and vars(state).items() >= trackers.items() and cfg.logger.wandb_project is None
