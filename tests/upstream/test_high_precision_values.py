"""The attribute in which Transformer Engine keeps values in high precision."""

import importlib.util

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("high_precision_values")


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is missing")
def test_transformer_engine_reset_parameters_sets_high_precision_values():
    CONTRACT.mentions(
        "transformer_engine.pytorch.module.base", "TransformerEngineBaseModule.reset_parameters",
        *("_high_precision_init_val", "get_high_precision_init_val", "clear_high_precision_init_val"),
    )  # fmt: skip


def test_distributed_optimizer_reads_high_precision_values():
    CONTRACT.mentions(
        "megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer._build_model_and_main_param_groups",
        *("get_high_precision_init_val", "clear_high_precision_init_val"),
    )  # fmt: skip
