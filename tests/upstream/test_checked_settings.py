"""Settings named by the tables of checks exist in the installed megatron-core and Megatron-Bridge.

A row that requires the default of a setting does nothing in a release without the setting (`config/checks.py`). So a
setting that an upgrade renames must fail here.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from operator import attrgetter
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge import registry
from qwen3vl_bridge.config import model_validation
from qwen3vl_bridge.config.checks import Check, Condition, Requires, declared_fields
from qwen3vl_bridge.models.common.provider import ExpertsMixin
from qwen3vl_bridge.training import run_validation

import pytest
from megatron.bridge import AutoBridge
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import InProcessRestartConfig, StragglerDetectionConfig
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from qwen3vl_recipes import qwen3_vl_2b_sft_config

pytestmark = pytest.mark.upstream

# Settings that only some of the supported releases have, with the releases. All others exist in every one of them.
IN_SOME_RELEASES: dict[str, str] = {
    "checkpoint.stream_ckpt_dequant": "megatron-core 0.19, but not its main branch of 2026-08-22",
}

MODELS = [("qwen3_vl", "8B"), ("qwen3_vl", "30B-A3B"), ("qwen3_5", "9B"), ("qwen3_5", "35B-A3B")]


def names_in(checks: Iterable[Check]) -> Iterator[str]:
    """Yield the settings that rows and their conditions name."""
    for row in checks:
        if isinstance(row, Requires):
            yield from row.name.split(" * ")
            if isinstance(row.when, Condition):
                yield from row.when.names.split()


def exists(settings: Any, path: str) -> bool:
    """Return True if a dotted path is a declared setting or property, in a section that is not None."""
    section, _, name = path.rpartition(".")
    try:
        owner = attrgetter(section)(settings) if section else settings
    except AttributeError:
        return False
    return name in declared_fields(owner) or hasattr(type(owner), name)


def check_names(checks: Iterable[Check], settings: Any) -> int:
    """Fail with the names that are missing, or return the number of names."""
    names = set(names_in(checks)) - IN_SOME_RELEASES.keys()
    if missing := sorted(name for name in names if not exists(settings, name)):
        releases = ", ".join(f"{name} {version(name)}" for name in ("megatron-core", "megatron-bridge"))
        pytest.fail(
            f"config/checks.py: {type(settings).__name__} has no {', '.join(missing)} ({releases})", pytrace=False
        )
    return len(names)


@pytest.mark.parametrize(("family", "size"), MODELS)
def test_provider_has_every_setting_named_in_model_checks(family, size):
    config = registry.family(family).presets.hf_config(size)
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    kind = model_validation.MOE if isinstance(provider, ExpertsMixin) else model_validation.DENSE
    checks = (
        *model_validation.PARALLEL_SIZES,
        *kind,
        *provider.checks,
        *model_validation.BEFORE_FINALIZE,
        *model_validation.AFTER_FINALIZE,
    )
    assert check_names((*checks, *model_validation.MODEL_CAN_TRAIN), provider) > 190


def test_run_config_has_every_setting_named_in_run_checks():
    cfg = qwen3_vl_2b_sft_config()
    cfg.straggler, cfg.inprocess_restart = StragglerDetectionConfig(), InProcessRestartConfig()
    cfg.comm_overlap, cfg.mixed_precision = CommOverlapConfig(tp_comm_overlap=False), MixedPrecisionConfig()
    tables = [
        value for value in vars(run_validation).values() if isinstance(value, tuple) and any(map(callable, value))
    ]
    checks = [row for table in tables for row in table]
    assert check_names(checks, cfg) > 150


def test_check_names_fails_with_name_of_setting_missing_in_megatron():
    provider = registry.family("qwen3_vl").presets
    row = Requires("moe_router_topk_renamed", 1)
    with pytest.raises(pytest.fail.Exception, match="has no moe_router_topk_renamed"):
        check_names([row], provider)


def test_setting_checks_include_settings_missing_in_some_releases():
    names = set(names_in((*model_validation.MOE, *model_validation.BEFORE_FINALIZE, *run_validation.AFTER_VALIDATE)))
    assert IN_SOME_RELEASES.keys() <= names
