"""The Megatron model of hybrid families: linear and full attention, a vision tower without DeepStack, and MTP.

Multi-token prediction (MTP) is an additional layer that predicts the token after the next. Its input for a token
combines the hidden state after the final norm with the embedding of the next token (a vision token inside an image).
The layer uses the position ids of the token, not of the next token. Embedding and output layer are shared with the
model. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; for vision tokens vLLM's qwen3_5_mtp, which serves these
weights.

Legend of shapes: b rows of the batch, s local sequence length, sp sequence-parallel ranks, h hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

from qwen3vl_bridge.core.batch import ModelInputs, NextTokens
from qwen3vl_bridge.models.common.layer_specs import backend
from qwen3vl_bridge.models.common.linear_attention import full_attention_spec, text_block_spec
from qwen3vl_bridge.models.common.loss import LossHead, token_losses
from qwen3vl_bridge.models.common.model import MRopeGPTModel, VisionLanguageModel, check_received
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.upstream.inference_layers import find_no_inference_layers
from qwen3vl_bridge.upstream.multi_token_prediction import EmbeddedPredictionLayer, count_correct_predictions

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def mtp_block_spec(config: TransformerConfig, layer: ModuleSpec) -> ModuleSpec:
    """Return the spec of the block for multi-token prediction. Its transformer layer has the spec `layer`."""
    find_no_inference_layers()
    modules = backend(config)
    norm = modules.layer_norm(rms_norm=True)
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=modules.column_parallel_linear(), mtp_model_layer=layer
    )
    spec = ModuleSpec(module=EmbeddedPredictionLayer, submodules=submodules)
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[spec])
    )


def attach_mtp_loss(
    model: MRopeGPTModel, hidden: Tensor, embedded: Tensor, following: NextTokens, arguments: dict[str, Any]
) -> Tensor:
    """Return `hidden` with the loss of multi-token prediction (MTP) attached: the backward pass adds its gradient.

    The MTP loss of a token has the weight `mtp_loss_scaling_factor` relative to the token's next-token loss, for every
    packing and parallel layout. megatron-core also weights a microbatch by the ratio of trained to predicted tokens,
    which is 1 if every answer is preceded by at least two tokens.

    Args:
        model: the text model.
        hidden: [s / sp, b, h] after the final norm.
        embedded: [s / sp, b, h] embedded next tokens.
        following: the next tokens.
        arguments: arguments of `compute_output`.
    """
    config, groups = model.mtp.config, model.pg_collection  # the provider, not the modified copy in `model.config`
    names = ("input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
    predicted, *_ = model.mtp.layers[0](
        hidden_states=hidden,
        attention_mask=None,
        padding_mask=following.padding_mask,
        embedding=embedded,
        **{name: arguments[name] for name in names},
    )
    losses, *accuracy = _mtp_losses(model, predicted, following, arguments["runtime_gather_output"])
    losses = losses * following.loss_mask
    with torch.no_grad():
        MTPLossLoggingHelper.save_metrics_to_tracker(
            losses.sum() * groups.cp.size() / following.num_predicted.clamp(min=1),
            *accuracy,
            layer_number=0,
            num_layers=1,
            avg_group=groups.dp_cp,
        )
    scale = config.mtp_loss_scaling_factor
    if not config.calculate_per_token_loss:  # mean over the microbatch; gradients are averaged over DP
        scale = scale * groups.cp.size() / following.num_trained.clamp(min=1)
    return MTPLossAutoScaler.apply(hidden, scale * losses)


def _mtp_losses(
    model: MRopeGPTModel, hidden: Tensor, following: NextTokens, gather: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return MTP losses [b, s], the number of correct top-1 predictions, and the number of trained tokens."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    head, counts = LossHead(model.output_layer, weight, gather, model.compute_language_model_loss), []

    def count_correct(logits: Tensor, labels: Tensor, mask: Tensor) -> None:
        logits = model.mask_vocabulary_padding(logits)
        counts.append(count_correct_predictions(logits, labels, mask, model.output_layer, gather, model.tp_group))

    labels, chunk_tokens = following.labels, model.config.loss_chunk_tokens
    losses = token_losses(head, hidden, labels, chunk_tokens, count_correct, (labels, following.loss_mask))
    correct, trained = (torch.stack(chunk_counts).sum(0) for chunk_counts in zip(*counts, strict=True))
    return losses, correct, trained


NEXT = "next_tokens"  # key of the embedded next tokens among the layer arguments


class HybridGPTModel(MRopeGPTModel):
    """The text model: megatron-core's GPT with two layer types, partial rotary embeddings and MTP.

    megatron-core's MTP embeds next tokens on the last stage, with a copy of the embedding and without images. Here the
    first stage embeds tokens and next tokens, so GPTModel is built and run without MTP.
    """

    block_spec = staticmethod(text_block_spec)

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection, **ends: Any) -> None:
        check_gates(config, pg_collection)
        super().__init__(config, pg_collection, **ends)
        if self.post_process and config.mtp_num_layers:
            self.mtp = self.build_mtp(config, pg_collection)
            if not config.trains_mtp:  # frozen weights are kept, so that they can be exported
                self.mtp.requires_grad_(False)

    def build_mtp(self, config: VisionLanguageProvider, groups: ProcessGroupCollection) -> nn.Module:
        """Return the module of multi-token prediction, with its layer in `layers`."""
        spec = mtp_block_spec(config, full_attention_spec(config))
        return MultiTokenPredictionBlock(config, spec, vp_stage=self.vp_stage, pg_collection=groups)

    def setup_embeddings_and_output_layer(self) -> None:
        """Set up tied embeddings as for a model without MTP, so that no stage copies the embedding for MTP."""
        # Layers keep the provider itself, because megatron-core counts MTP layers among the layers with experts.
        self.config = copy.copy(self.config)
        self.config.mtp_num_layers = None
        super().setup_embeddings_and_output_layer()

    def forward(
        self,
        *args: Any,
        prediction: tuple[Tensor, NextTokens] | None = None,
        output_processor_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run GPTModel. `prediction` is a pair: embeddings of next tokens [s / sp, b, h], and their `NextTokens`."""
        return super().forward(*args, output_processor_context=(prediction, output_processor_context), **kwargs)

    def compute_output(self, hidden_states: Tensor, *, output_processor_context: Any, **arguments: Any) -> Any:
        """Return the output of MRopeGPTModel. If the batch has next tokens, the gradient includes the MTP loss."""
        prediction, context = output_processor_context
        if prediction is not None and self.post_process:
            hidden_states = attach_mtp_loss(self, hidden_states, *prediction, arguments)
        states = self.output_states(hidden_states)
        return super().compute_output(states, output_processor_context=context, **arguments)

    def output_states(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states [s / sp, b, h] from which logits are computed, by default `hidden_states`."""
        return hidden_states


def check_gates(config: VisionLanguageProvider, groups: ProcessGroupCollection) -> None:
    """Raise ValueError if megatron-core would select queries and their gates by different tensor-parallel ranks.

    If ranks share a query group, megatron-core 0.19 selects queries by the rank in the group of the model, and gates by
    the rank in the global group.
    """
    global_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if groups.tp.size() > config.num_query_groups and global_group is not groups.tp:
        raise ValueError(
            f"tensor_model_parallel_size is {groups.tp.size()} with {config.num_query_groups} query groups, and the "
            "model has its own process groups: gates would belong to other heads. Use the groups of megatron-core's "
            "parallel_state, or at most one rank per query group"
        )


class HybridModel(VisionLanguageModel):
    """One pipeline stage of a hybrid model: the vision tower on the first stage, text layers on all stages."""

    language_model_class = HybridGPTModel

    def check_inputs(self, inputs: ModelInputs) -> None:
        """Raise ValueError if multi-token prediction is trained and the batch has no labels."""
        if self.config.trains_mtp and self.training and torch.is_grad_enabled() and inputs.next_tokens is None:
            raise ValueError(
                "mtp_loss_scaling_factor is above 0, but the batch has no labels. Pass labels on every pipeline stage, "
                "or set mtp_loss_scaling_factor=0, which freezes the weights of multi-token prediction"
            )

    def embed(self, inputs: ModelInputs, encoded: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Return hidden states [s / sp, b, h], and a dict of additional layer inputs.

        The dict has the embedded next tokens if MTP is computed for this batch. Otherwise it is empty.
        """
        encoded = encoded or self.encode(inputs)
        hidden, layer_arguments = super().embed(inputs, encoded)
        if self.predicts(inputs):
            following = inputs.next_tokens
            layer_arguments = {NEXT: self.embed_tokens(following.input_ids, encoded[0], following.fuse)}
        return hidden, layer_arguments

    def decode(
        self, inputs: ModelInputs, hidden: Tensor | None, layer_arguments: dict[str, Any], **arguments: Any
    ) -> Any:
        """Run the text model on the results of `embed` or `receive`, which may include embedded next tokens."""
        prediction, _ = self.output_context(inputs, layer_arguments)
        return super().decode(inputs, hidden, {}, prediction=prediction, **arguments)

    def output_context(
        self, inputs: ModelInputs, layer_arguments: dict[str, Any]
    ) -> tuple[tuple[Tensor, NextTokens] | None, None]:
        """Return the argument `output_processor_context` of the text model's `compute_output`, a tuple.

        The first entry has the inputs of the MTP loss: a pair of the embedded next tokens and the `NextTokens`. It is
        None if the batch has no MTP loss. The second entry is the context of a caller's `output_processor`. This
        method always sets it to None.
        """
        embedded = layer_arguments.get(NEXT)
        return None if embedded is None else (embedded, inputs.next_tokens), None

    def pack(self, hidden: Tensor, layer_arguments: dict[str, Any]) -> Tensor:
        """Return one tensor with hidden states and embedded next tokens, if there are any, for the next stage."""
        if NEXT not in layer_arguments:
            return super().pack(hidden, layer_arguments)
        return torch.cat((hidden, layer_arguments[NEXT].to(hidden.dtype)))

    def unpack(self, received: Tensor, length: int, inputs: ModelInputs) -> tuple[Tensor, dict[str, Any]]:
        """Return hidden states and, if this batch has an MTP loss, the embedded next tokens as a layer argument."""
        if not self.predicts(inputs):
            return super().unpack(received, length, inputs)
        rows = len(inputs.input_ids)
        check_received(received, 2 * length * rows, f"{length} tokens of {rows} rows and as many next tokens")
        hidden, embedded = received.chunk(2)
        return hidden, {NEXT: embedded}

    def predicts(self, inputs: ModelInputs) -> bool:
        """Return whether MTP is computed for this batch: in training, or if the batch asks to measure it.

        The batch must have next tokens, which are made from its labels.
        """
        following = inputs.next_tokens
        return following is not None and (following.measured or (self.training and torch.is_grad_enabled()))
