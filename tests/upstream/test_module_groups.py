"""Functions that create the groups of separate vision and language ranks."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("module_groups")


def test_functions_creating_process_groups_have_expected_parameters():
    CONTRACT.takes("megatron.core.parallel_state", "_set_global_memory_buffer")
    CONTRACT.takes(
        "megatron.bridge.training.initialize", "_create_dist_train_pgs",
        *("model_config", "num_distributed_optimizer_instances"),
        *("get_embedding_ranks", "get_position_embedding_ranks"),
    )  # fmt: skip
