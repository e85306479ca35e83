"""megatron-core's combined schedule (`overlap_moe_expert_parallel_comm`), with public places to change its nodes.

Overridden: `TransformerLayerSchedulePlan._build_callable_nodes` and
`TransformerModelChunkSchedulePlan._extra_args_for_layer`. Called: `_forward_attention` and
`_forward_pre_mlp_layernorm`, the parts of `TransformerLayer.forward` that the nodes of a layer call one by one.
megatron-core builds the nodes of a plain GPT layer, and has a registry neither for a layer's nodes nor for their
arguments. Delete this module when a layer class can provide its own nodes.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class LayerNodes(TransformerLayerSchedulePlan):
    """megatron-core's plan of one layer, whose nodes a subclass changes after they are built."""

    def change_nodes(self, event: Any, comp_stream: Any, extra_args: dict[str, Any]) -> None:
        """Change the nodes that megatron-core has built, given the arguments with which it has built them."""
        raise NotImplementedError

    def _build_callable_nodes(self, event: Any, comp_stream: Any, comm_stream: Any, extra_args: dict[str, Any]) -> None:
        super()._build_callable_nodes(event, comp_stream, comm_stream, extra_args)
        self.change_nodes(event, comp_stream, extra_args)


class ModelNodes(TransformerModelChunkSchedulePlan):
    """megatron-core's plan of one model chunk, for which a subclass chooses the arguments of each layer's nodes."""

    def layer_node_arguments(self, index: int, layers: int) -> dict[str, Any]:
        """Return `extra_args` of the nodes of the layer with index `index` in this chunk of `layers` layers."""
        raise NotImplementedError

    def _extra_args_for_layer(self, module: Any, layer_idx: int, num_layers: int) -> dict[str, Any]:
        return self.layer_node_arguments(layer_idx, num_layers)


def attend(layer: TransformerLayer, hidden: Tensor, **arguments: Any) -> Tensor:
    """Return the hidden states after a layer's attention and residual connection.

    `arguments` are further arguments of `TransformerLayer.forward`.
    """
    return layer._forward_attention(hidden, **arguments)[0]


def normalize_before_experts(layer: TransformerLayer, hidden: Tensor) -> Tensor:
    """Apply the norm before a layer's experts, and drop the context of activation offloading.

    Offloading is rejected with this schedule, and the context would hold `hidden` until the next microbatch.
    """
    normed = layer._forward_pre_mlp_layernorm(hidden)
    layer.mlp_norm_manager = None
    return normed
