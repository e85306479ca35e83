"""Modules of Megatron-Bridge that look for layers of Transformer Engine: adapters by flags, groups by a class."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("missing_transformer_engine")


@pytest.mark.parametrize("module", ["megatron.bridge.peft.utils", "megatron.bridge.peft.module_matcher"])
def test_megatron_bridge_peft_flags_are_false_without_transformer_engine(module):
    from qwen3vl_bridge.lazy import is_installed

    for name in ("HAVE_TE", "HAVE_TE_COL_LINEAR", "HAVE_TE_LN_COL_LINEAR", "HAVE_TE_ROW_LINEAR"):
        found = CONTRACT.find(module, name, bool)
        if found and not is_installed("transformer_engine"):
            CONTRACT.fail(module, f"{name} is True without Transformer Engine")


def test_install_pg_collection_mentions_transformer_engine_attention():
    module = "megatron.bridge.training.eval_context_parallel_rebinding"
    CONTRACT.takes(module, "install_pg_collection", "model", "target")
    CONTRACT.mentions(
        module, "install_pg_collection", "TEDotProductAttention", "pg_collection", "context_parallel_size"
    )
    CONTRACT.find("megatron.core.extensions.transformer_engine", "TEDotProductAttention")
