"""The tensors that megatron-core's token dispatchers keep after a layer's forward pass.

Set to None: attributes of the dispatchers. The flexible dispatcher has them in its `_comm_manager`, of class
`_DeepepManager` or `_HybridEPManager`. The tensors keep the finished autograd graph of the layer alive, or are large
maps from tokens to experts, and stay until the next forward pass (docs/upstream/moe_graphs.md). Delete this module when
megatron-core drops them.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    _DeepepManager,
    _HybridEPManager,
)

# Scores with a graph, and maps of tokens to experts: [t, experts], or for Transformer Engine's permutation twice as
# wide in int32. Nothing reads them between two forward passes, and autograd has saved what the backward pass needs.
# "deepep" and "hybridep" are the flexible dispatcher's backends that a provider accepts.
ROUTED_TENSORS: dict[type, tuple[str, ...]] = {
    MoEAllGatherTokenDispatcher: ("local_probs", "reversed_local_input_permutation_mapping"),
    MoEAlltoAllTokenDispatcher: ("probs", "routing_map", "reversed_local_input_permutation_mapping"),
    _DeepepManager: ("token_probs", "dispatched_probs", "reversed_mapping_for_combine"),
    _HybridEPManager: ("token_probs", "dispatched_probs", "routing_map"),
}


def drop_routed_tensors(dispatcher: Any) -> None:
    """Set to None the attributes of a token dispatcher that hold tensors of a finished forward pass."""
    owner = dispatcher._comm_manager if isinstance(dispatcher, MoEFlexTokenDispatcher) else dispatcher
    for kind, names in ROUTED_TENSORS.items():
        if isinstance(owner, kind):
            for name in names:
                setattr(owner, name, None)
