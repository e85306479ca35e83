"""Attributes of providers in which Megatron-Bridge keeps groups and the communicator between modules."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("provider_groups")


def test_provider_keeps_process_groups_in_private_pg_collection():
    CONTRACT.find("megatron.bridge.models.gpt_provider", "GPTModelProvider._pg_collection")
    CONTRACT.mentions("megatron.bridge.models.gpt_provider", "GPTModelProvider.provide", "_pg_collection")
    CONTRACT.mentions(
        "megatron.bridge.models.model_provider", "ModelProviderMixin.provide_distributed_model", "_pg_collection"
    )


def test_create_dist_train_pgs_sets_private_p2p_communicator():
    CONTRACT.mentions("megatron.bridge.training.initialize", "_create_dist_train_pgs", "_p2p_communicator")
    CONTRACT.mentions("megatron.bridge.training.train", "train", "_p2p_communicator")
