"""Schedules that a run could not follow are refused before anything is built."""

from __future__ import annotations

from qwen3vl_bridge.training.run_checks import check_schedule

import pytest
import qwen3vl_recipes


@pytest.mark.parametrize(
    "name", ["optimizer.lr", "optimizer.min_lr", "scheduler.start_weight_decay", "scheduler.end_weight_decay"]
)
def test_an_end_that_is_none_is_named(name):
    cfg = qwen3vl_recipes.qwen3_vl_2b_sft_config()
    check_schedule(cfg)
    section, field = name.split(".")
    setattr(getattr(cfg, section), field, None)
    with pytest.raises(ValueError, match=f"^{name}: found None, expected numbers"):
        check_schedule(cfg)
