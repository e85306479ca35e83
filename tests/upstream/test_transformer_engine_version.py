"""megatron-core's cache of the release of Transformer Engine."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("transformer_engine_version")
UTILS = "megatron.core.utils"


def test_with_transformer_engine_sets_cached_version_and_restores_it():
    CONTRACT.find(UTILS, "_te_version")
    CONTRACT.mentions(UTILS, "get_te_version", "_te_version")
    from qwen3vl_bridge.upstream.transformer_engine_version import with_transformer_engine

    from megatron.core.utils import get_te_version

    before = get_te_version()
    with with_transformer_engine("2.16.1"):
        found = get_te_version()
    expected = str(before) if before.release[0] else "2.16.1"
    if str(found) != expected:
        CONTRACT.fail(UTILS, f"get_te_version() is {found} inside, expected {expected}")
    assert get_te_version() == before
