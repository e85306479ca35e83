"""Names of megatron-core that upstream/moe_dispatcher.py reads and clears."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("moe_dispatcher")
DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
# Restated, so that a class that is renamed fails here and not in an import.
TENSORS = {
    "MoEAllGatherTokenDispatcher": ("local_probs", "reversed_local_input_permutation_mapping"),
    "MoEAlltoAllTokenDispatcher": ("probs", "routing_map", "reversed_local_input_permutation_mapping"),
    "_DeepepManager": ("token_probs", "dispatched_probs", "reversed_mapping_for_combine"),
    "_HybridEPManager": ("token_probs", "dispatched_probs", "routing_map"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_token_dispatchers_set_attributes_that_we_clear(name):
    CONTRACT.find(DISPATCHER, name, type)
    CONTRACT.mentions(DISPATCHER, name, *(f"self.{tensor}" for tensor in TENSORS[name]))


def test_flex_token_dispatcher_has_private_comm_manager():
    CONTRACT.find(DISPATCHER, "MoEFlexTokenDispatcher", type)
    CONTRACT.mentions(DISPATCHER, "MoEFlexTokenDispatcher", "self._comm_manager", "_DeepepManager", "_HybridEPManager")


def test_moe_layer_postprocess_has_expected_parameters():
    CONTRACT.takes(
        "megatron.core.transformer.moe.moe_layer", "MoELayer.postprocess", "self", "output", "shared_expert_output"
    )


def test_drop_routed_tensors_clears_listed_attributes_of_every_dispatcher():
    from qwen3vl_bridge.upstream.moe_dispatcher import ROUTED_TENSORS, MoEFlexTokenDispatcher, drop_routed_tensors

    assert {kind.__name__: names for kind, names in ROUTED_TENSORS.items()} == TENSORS
    for kind, names in ROUTED_TENSORS.items():
        owner = dispatcher = kind.__new__(kind)
        vars(owner).update(dict.fromkeys(names, 1), hidden_shape=(1,))
        if kind.__name__.startswith("_"):
            dispatcher = MoEFlexTokenDispatcher.__new__(MoEFlexTokenDispatcher)
            dispatcher._comm_manager = owner
        drop_routed_tensors(dispatcher)
        assert vars(owner) == {**dict.fromkeys(names), "hidden_shape": (1,)}
