"""Overlapping the expert all-to-all with compute (`overlap_moe_expert_parallel_comm`).

megatron-core's combined schedule runs the forward pass of one microbatch and the backward pass of another on two
streams. It needs the forward pass as a sequence of nodes. The nodes of a layer are megatron-core's: attention and
router, dispatch, experts, combine. This module adds what the nodes of megatron-core lack:

- The first node encodes images and replaces placeholders.
- A fifth node of a layer, on the compute stream, adds DeepStack features. After the last layer of a stage it also
  applies the final norm and packs the tensor for the next stage.
- Routers get the padding mask.
- Multi-token prediction belongs to the last node.

Autograd sees each node as a separate graph. Tensors that several nodes use are detached in the node that makes them:
the first node, or on later stages the first node of the first layer, which unpacks the received tensor. Their gradients
are added to that node's backward pass, which runs last. In this module `model` is the `VisionLanguageModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from qwen3vl_bridge.core.batch import ModelInputs
from qwen3vl_bridge.models.common.attention import layout_packed_seq_params
from qwen3vl_bridge.upstream.schedule_nodes import LayerNodes, ModelNodes, attend, normalize_before_experts

from megatron.core import tensor_parallel
from megatron.core.models.common.utils import PostProcessNode, PreProcessNode, TransformerLayerNode, weak_method
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class EmbeddingNode(PreProcessNode):
    """First schedule node. It embeds tokens and images on the first pipeline stage.

    On later pipeline stages, it returns the received tensor.
    """

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model.language_model, *arguments)
        self.full_model = model
        self.backward_func = weak_method(self.backward_impl)
        self.shared: list[tuple[Tensor, Tensor]] = []  # tensors that other nodes use, with their detached copies

    def forward_impl(self) -> Tensor:
        """Return hidden states [s / sp, b, h], and store additional layer inputs in the state that nodes share.

        On later pipeline stages, only return the received tensor.
        """
        model, state = self.full_model, self.chunk_state
        if not model.pre_process:
            self.model.set_input_tensor(model.take_received())
            return super().forward_impl()
        state.decoder_input, arguments = model.embed(state.inputs)
        state.layer_arguments = {name: self._detach_shared(value) for name, value in arguments.items()}
        hidden = super().forward_impl()
        if not hidden.requires_grad:  # nothing before the layers is trained, but each node of a layer needs a gradient
            hidden.requires_grad_()
        return hidden

    def _detach_shared(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        self.shared.append((value, leaf))
        return leaf

    def backward_impl(self, outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one backward pass from the outputs of this node and from its tensors that other nodes use.

        `gradients` are the gradients of `outputs`. Return a tuple of these, followed by the gradients of the tensors
        that other nodes use.
        """
        used = [(value, leaf.grad) for value, leaf in self.shared if leaf.grad is not None]
        gradients += tuple(gradient for _, gradient in used)
        self.shared.clear()
        return self.default_backward_func(outputs + tuple(value for value, _ in used), gradients)


class LossNode(PostProcessNode):
    """Schedule node that computes losses [b, s] from hidden states, including multi-token prediction."""

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model.language_model, *arguments)
        self.full_model = model

    def forward_impl(self, hidden_states: Tensor) -> Tensor:
        """Return losses [b, s] of hidden states after the final norm."""
        state = self.chunk_state
        state.output_processor_context = self.full_model.output_context(state.inputs, state.layer_arguments)
        return super().forward_impl(hidden_states)


class LayerPlan(LayerNodes):
    """The schedule nodes of one layer, changed for DeepStack, padding masks and pipeline stages."""

    def change_nodes(self, event: Any, comp_stream: Any, extra_args: dict[str, Any]) -> None:
        """Replace the nodes that need a padding mask or a received tensor, and add a fifth node if the layer needs one.

        The fifth node adds DeepStack features and ends the stage. The arguments are those with which megatron-core has
        built the nodes.
        """
        layer, last = self.layer, extra_args["ends_stage"]
        if isinstance(layer.mlp, MoELayer):
            self.pre_dispatch_computation.submodule = partial(attend_and_route, layer)
        if extra_args["is_first_layer"] and not self.chunk_state.model.pre_process:
            self.pre_dispatch_computation.submodule = partial(unpack_then, self.pre_dispatch_computation.submodule)
        if last or getattr(layer, "adds_features", False):
            output = partial(finish_layer, layer, last)
            states = (self.layer_state, self.chunk_state)
            self.mtp_post_process = TransformerLayerNode(
                comp_stream, event, *states, output, name="layer_output", extra_args=extra_args
            )

    def get_low_precision_context(self) -> AbstractContextManager:
        """Return a context manager for FP8 and, under sequence parallelism, the rank's own random numbers."""
        context = ExitStack()
        if self.config.sequence_parallel:
            context.enter_context(tensor_parallel.get_cuda_rng_tracker().fork())
        context.enter_context(super().get_low_precision_context())
        return context


def unpack_then(compute: Callable[..., Any], node: TransformerLayerNode, received: Tensor) -> Any:
    """Unpack the tensor received from the previous pipeline stage, then call `compute` with the hidden states in it.

    `compute` is the function of the first layer's first node.
    """
    state = node.chunk_state
    hidden, arguments = state.model.unpack_received(received, state.inputs)
    # An empty tensor (no images, or no features for later layers) has no gradient.
    state.layer_arguments = {
        name: node.detach(value) if value.requires_grad and value.numel() else value.detach()
        for name, value in arguments.items()
    }
    return compute(node, hidden)


def attend_and_route(layer: TransformerLayer, node: TransformerLayerNode, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Run attention, the shared experts and the router of a layer.

    This function replaces the function of megatron-core's first node, which does not pass the padding mask to the
    router.

    Returns:
        The tokens, sorted by expert, and their routing probabilities.
    """
    state, mlp = node.chunk_state, layer.mlp
    hidden = attend(
        layer,
        hidden,
        rotary_pos_emb=state.rotary_pos_emb,
        rotary_pos_cos=state.rotary_pos_cos,
        rotary_pos_sin=state.rotary_pos_sin,
        packed_seq_params=state.packed_seq_params,
    )
    normed = normalize_before_experts(layer, hidden)
    shared = mlp.shared_experts_compute(normed)
    padding = None if state.padding_mask is None else state.padding_mask.T.bool()
    tokens, weights = mlp.preprocess(normed, *mlp.route(normed, padding))
    node.layer_state.residual = node.detach(hidden)
    if shared is not None:
        node.layer_state.shared_expert_output = node.detach(shared)
    return tokens, weights


def finish_layer(layer: TransformerLayer, is_last: bool, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
    """Return the output of a layer, with DeepStack features added if it is one of the first layers.

    For the last layer of a stage, return the result of the final norm, or the packed tensor for the next stage.
    """
    state = node.chunk_state
    if getattr(layer, "adds_features", False):
        hidden = layer.add_features(hidden, **state.layer_arguments)
    if not is_last:
        return hidden
    if state.model.decoder.final_layernorm is not None:
        hidden = state.model.decoder.final_layernorm(hidden)
    return hidden if state.model.post_process else state.model.pack(hidden, state.layer_arguments)


class ModelSchedulePlan(ModelNodes):
    """The schedule nodes that compute one microbatch in one model chunk."""

    LAYER_SCHEDULE_PLAN_CLASS = LayerPlan
    PRE_PROCESS_NODE_CLASS = EmbeddingNode
    POST_PROCESS_NODE_CLASS = LossNode

    def __init__(self, model: Any, inputs: ModelInputs) -> None:
        super().__init__(
            model,
            inputs.input_ids,
            inputs.position_ids,
            attention_mask=None,
            labels=inputs.labels,
            packed_seq_params=layout_packed_seq_params(inputs.layout),
            padding_mask=inputs.padding_mask,
        )
        self.state.inputs = inputs

    def layer_node_arguments(self, index: int, layers: int) -> dict[str, Any]:
        """Return `extra_args` for the nodes of the layer with this index, if the model chunk has `layers` layers."""
        # megatron-core would apply the final norm of its last layer before DeepStack features are added.
        return dict(is_first_layer=index == 0, is_last_layer=False, ends_stage=index == layers - 1)
