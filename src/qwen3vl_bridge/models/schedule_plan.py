"""Experts' all-to-all under computation (`overlap_moe_expert_parallel_comm`): a microbatch's forward pass as nodes that
megatron-core's combined schedule runs between those of another microbatch's backward pass, on two streams.

The nodes of a layer are megatron-core's: attention and router, dispatch, experts, combine. What its plan has no place
for is added: the first node encodes images and fuses them with the tokens; a layer's fifth node, on the stream of
computation, adds DeepStack features, and after a stage's last layer applies the final norm and packs what the next
stage needs; and routers get the padding mask. Multi-token prediction is part of the last node.

Autograd sees each node as a graph of its own. Tensors that go from the first node to several others (on a later stage:
from the first layer's, which unpacks what was received) are detached there, and their gradients return to it last.
Each `model` is the `VisionLanguageModel`, whose module imports this one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from qwen3vl_bridge.batch.token_batch import ModelInputs
from qwen3vl_bridge.models.core_attention import layout_packed_seq_params

from megatron.core import tensor_parallel
from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.common.utils import PostProcessNode, PreProcessNode, TransformerLayerNode, weak_method
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class EmbeddingNode(PreProcessNode):
    """Hidden states of tokens and images for the first layer; or what the previous stage sent, as it is."""

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model.language_model, *arguments)
        self.whole_model = model
        self.backward_func = weak_method(self.backward_impl)
        self.passed: list[tuple[Tensor, Tensor]] = []  # what other nodes use too, and the leaves that they see

    def forward_impl(self) -> Tensor:
        """Hidden states [s / sp, b, h]; the layers' other inputs become those of the chunk."""
        model, state = self.whole_model, self.chunk_state
        if not model.pre_process:
            self.model.set_input_tensor(model.take_received())
            return super().forward_impl()
        state.decoder_input, arguments = model.embed(state.inputs)
        state.layer_arguments = {name: self._leaf(value) for name, value in arguments.items()}
        hidden = super().forward_impl()
        if not hidden.requires_grad:  # nothing before the layers is trained; each node of theirs has to have a gradient
            hidden.requires_grad_()
        return hidden

    def _leaf(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        self.passed.append((value, leaf))
        return leaf

    def backward_impl(self, outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One backward pass of all that this node has handed out."""
        used = [(value, leaf.grad) for value, leaf in self.passed if leaf.grad is not None]
        gradients += tuple(gradient for _, gradient in used)
        self.passed.clear()
        return self.default_backward_func(outputs + tuple(value for value, _ in used), gradients)


class LossNode(PostProcessNode):
    """Losses [b, s] of the hidden states after the final norm, with multi-token prediction."""

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model.language_model, *arguments)
        self.whole_model = model

    def forward_impl(self, hidden_states: Tensor) -> Tensor:
        """See PostProcessNode."""
        state = self.chunk_state
        state.output_processor_context = self.whole_model.output_context(state.inputs, state.layer_arguments)
        return super().forward_impl(hidden_states)


class LayerPlan(TransformerLayerSchedulePlan):
    """The nodes of one layer."""

    def _build_callable_nodes(self, event: Any, comp_stream: Any, comm_stream: Any, extra_args: dict[str, Any]) -> None:
        super()._build_callable_nodes(event, comp_stream, comm_stream, extra_args)
        layer, last = self.layer, extra_args["ends_stage"]
        if isinstance(layer.mlp, MoELayer):
            self.pre_dispatch_computation.submodule = partial(attend_and_route, layer)
        if extra_args["is_first_layer"] and not self.chunk_state.model.pre_process:
            self.pre_dispatch_computation.submodule = partial(unpacked, self.pre_dispatch_computation.submodule)
        if last or getattr(layer, "adds_features", False):
            output = partial(layer_output, layer, last)
            states = (self.layer_state, self.chunk_state)
            self.mtp_post_process = TransformerLayerNode(
                comp_stream, event, *states, output, name="layer_output", extra_args=extra_args
            )

    def get_low_precision_context(self) -> AbstractContextManager:
        """In addition, dropout's random numbers of this rank's own under sequence parallelism, as in a whole block."""
        context = ExitStack()
        if self.config.sequence_parallel:
            context.enter_context(tensor_parallel.get_cuda_rng_tracker().fork())
        context.enter_context(super().get_low_precision_context())
        return context


def unpacked(attend: Callable[..., Any], node: TransformerLayerNode, received: Tensor) -> Any:
    """A stage's first node of a layer, of what the previous stage sent.

    The schedule returns the gradient of this node's input to the previous stage, before the embedding node's backward
    pass.
    """
    state = node.chunk_state
    hidden, arguments = state.model.unpack_received(received, state.inputs)
    # Of nothing (no features are left, or no images) there is no gradient.
    state.layer_arguments = {
        name: node.detach(value) if value.requires_grad and value.numel() else value.detach()
        for name, value in arguments.items()
    }
    return attend(node, hidden)


def attend_and_route(layer: TransformerLayer, node: TransformerLayerNode, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Attention, shared experts and router of a layer: tokens in the order of their experts, and their weights.

    megatron-core's own node does not give the router the padding mask.
    """
    state, mlp = node.chunk_state, layer.mlp
    hidden, _ = layer._forward_attention(
        hidden,
        rotary_pos_emb=state.rotary_pos_emb,
        rotary_pos_cos=state.rotary_pos_cos,
        rotary_pos_sin=state.rotary_pos_sin,
        packed_seq_params=state.packed_seq_params,
    )
    normed = layer._forward_pre_mlp_layernorm(hidden)
    layer.mlp_norm_manager = None  # of offloading, refused here; it would hold `hidden` until the next microbatch
    shared = mlp.shared_experts_compute(normed)
    padding = None if state.padding_mask is None else state.padding_mask.T.bool()
    tokens, weights = mlp.preprocess(normed, *mlp.route(normed, padding))
    node.layer_state.residual = node.detach(hidden)
    if shared is not None:
        node.layer_state.shared_expert_output = node.detach(shared)
    return tokens, weights


def layer_output(layer: TransformerLayer, last: bool, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
    """What follows a layer's experts: DeepStack features, and the end of the decoder if it is the stage's last."""
    state = node.chunk_state
    if getattr(layer, "adds_features", False):
        hidden = layer.add_features(hidden, **state.layer_arguments)
    if not last:
        return hidden
    if state.model.decoder.final_layernorm is not None:
        hidden = state.model.decoder.final_layernorm(hidden)
    return hidden if state.model.post_process else state.model.pack(hidden, state.layer_arguments)


class ModelSchedulePlan(TransformerModelChunkSchedulePlan):
    """The nodes of one microbatch in one part of the model."""

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

    def _extra_args_for_layer(self, module: Any, layer_idx: int, num_layers: int) -> dict[str, Any]:
        # For megatron-core no layer is the last: it would apply the final norm before DeepStack features are added.
        return dict(is_first_layer=layer_idx == 0, is_last_layer=False, ends_stage=layer_idx == num_layers - 1)
