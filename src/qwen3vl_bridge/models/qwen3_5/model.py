"""The Megatron Qwen3.5-VL model: linear and full attention, a vision tower without DeepStack, multi-token prediction.

Multi-token prediction (MTP) is an additional layer that predicts the token after the next. For each token, its input
combines the next token's embedding (its vision token, if it is part of an image) with the token's own hidden state
after the final norm; position ids are the token's own. Embedding and output layer are shared with the model. Source:
DeepSeek-V3 (arXiv 2412.19437), section 2.2; for vision tokens vLLM's qwen3_5_mtp, the implementation that serves these
weights.
"""

from __future__ import annotations

import copy
from typing import Any

from qwen3vl_bridge.batch.token_batch import ModelInputs, NextTokens
from qwen3vl_bridge.models.chunked_loss import Head, token_losses
from qwen3vl_bridge.models.layer_specs import backend
from qwen3vl_bridge.models.model import MRopeGPTModel, VisionLanguageModel, check_received
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.qwen3_5.linear_attention import full_attention_spec, text_block_spec

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    _compute_mtp_acceptance_counts,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class NextTokenLayer(MultiTokenPredictionLayer):
    """megatron-core's MTP layer with precomputed embeddings: the original rolls ids and does not support images."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Tensor,
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Inputs of the layer; `embedding` is the embedded next tokens, [s / sp, b, h]."""
        return input_ids, position_ids, padding_mask, embedding, hidden_states


def mtp_block_spec(config: TransformerConfig, layer: ModuleSpec) -> ModuleSpec:
    """Spec of the MTP block with its single layer, a decoder layer with full attention."""
    modules = backend(config)
    norm = modules.layer_norm(rms_norm=True)
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=modules.column_parallel_linear(), mtp_model_layer=layer
    )
    spec = ModuleSpec(module=NextTokenLayer, submodules=submodules)
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[spec])
    )


def with_mtp_loss(
    model: MRopeGPTModel, hidden: Tensor, embedded: Tensor, following: NextTokens, arguments: dict[str, Any]
) -> Tensor:
    """Attach the MTP loss to hidden states [s / sp, b, h] after the final norm: their backward pass also computes its
    gradient. `embedded` are next tokens [s / sp, b, h], `arguments` those of `GPTModel._postprocess`.

    A token's MTP loss is weighted by `mtp_loss_scaling_factor` relative to its own loss, regardless of how tokens are
    split and packed. megatron-core additionally weights a microbatch by the ratio of trained to predicted tokens, which
    is 1 if every answer is preceded by at least two tokens.
    """
    config, groups = model.mtp.config, model.pg_collection  # the provider, not GPTModel's modified copy
    names = ("input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
    predicted, *_ = model.mtp.layers[0](
        hidden_states=hidden,
        attention_mask=None,
        padding_mask=following.padding_mask,
        embedding=embedded,
        **{name: arguments[name] for name in names},
    )
    losses, *accepted = _mtp_losses(model, predicted, following, arguments["runtime_gather_output"])
    losses = losses * following.loss_mask
    with torch.no_grad():
        MTPLossLoggingHelper.save_metrics_to_tracker(
            losses.sum() * groups.cp.size() / following.predicted.clamp(min=1),
            *accepted,
            layer_number=0,
            num_layers=1,
            avg_group=groups.dp_cp,
        )
    scale = config.mtp_loss_scaling_factor
    if not config.calculate_per_token_loss:  # mean over the microbatch; gradients are averaged over DP
        scale = scale * groups.cp.size() / following.trained.clamp(min=1)
    return MTPLossAutoScaler.apply(hidden, scale * losses)


def _mtp_losses(
    model: MRopeGPTModel, hidden: Tensor, following: NextTokens, gather: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [b, s] of MTP; number of trained tokens with a correct top-1 prediction; number of trained tokens."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    head, counts = Head(model.output_layer, weight, gather, model.compute_language_model_loss), []

    def seen(logits: Tensor, labels: Tensor, mask: Tensor) -> None:
        logits = model.without_padding(logits)
        counts.append(_compute_mtp_acceptance_counts(logits, labels, mask, model.output_layer, gather, model.tp_group))

    labels, tokens = following.labels, model.config.loss_chunk_tokens
    losses = token_losses(head, hidden, labels, tokens, seen, (labels, following.loss_mask))
    likeliest, trained = (torch.stack(of_chunks).sum(0) for of_chunks in zip(*counts, strict=True))
    return losses, likeliest, trained


_NEXT = "next_tokens"  # key of the embedded next tokens in the payload between pipeline stages


class Qwen35VLGPTModel(MRopeGPTModel):
    """The text model: megatron-core's GPT with two layer types, partial rotary embeddings, and MTP.

    megatron-core's MTP embeds tokens again on the last stage, with a copy of the embedding, and does not support
    images there. Here the first stage computes both embeddings, so GPTModel is built and run without MTP.
    """

    block_spec = staticmethod(text_block_spec)

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection, **ends: Any) -> None:
        check_gates(config, pg_collection)
        super().__init__(config, pg_collection, **ends)
        if self.post_process and config.mtp_num_layers:
            spec = mtp_block_spec(config, full_attention_spec(config))
            self.mtp = MultiTokenPredictionBlock(config, spec, vp_stage=self.vp_stage, pg_collection=pg_collection)
            # Frozen weights are kept, so that they can be exported.
            self.mtp.requires_grad_(config.trains_mtp)

    def setup_embeddings_and_output_layer(self) -> None:
        """Like LanguageModule's for a model without MTP: no stage holds a copy of the embedding for it."""
        # The layers keep the provider itself, because megatron-core counts MTP layers among those with experts.
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
        """Like GPTModel's; `prediction` is embedded next tokens [s / sp, b, h] and their `NextTokens`, or None."""
        return super().forward(*args, output_processor_context=(prediction, output_processor_context), **kwargs)

    def _postprocess(self, hidden_states: Tensor, *, output_processor_context: Any, **arguments: Any) -> Any:
        prediction, context = output_processor_context
        if prediction is not None and self.post_process:
            hidden_states = with_mtp_loss(self, hidden_states, *prediction, arguments)
        return super()._postprocess(hidden_states, output_processor_context=context, **arguments)


def check_gates(config: VisionLanguageProvider, groups: ProcessGroupCollection) -> None:
    """Check that queries and their gates are selected with the same tensor-parallel rank.

    If ranks share a query group, megatron-core 0.19 selects queries by rank in the model's group, and gates by rank in
    the global one.
    """
    known = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if groups.tp.size() > config.num_query_groups and known is not groups.tp:
        raise ValueError(
            f"tensor_model_parallel_size is {groups.tp.size()} with {config.num_query_groups} query groups and process "
            "groups of the model's own, expected those of megatron-core's parallel_state, or no more ranks than query "
            "groups: gates would be other heads'"
        )


class Qwen35VLModel(VisionLanguageModel):
    """Qwen3.5-VL of one pipeline stage: the vision tower on the first stage, the text model on all stages."""

    language_model_class = Qwen35VLGPTModel

    def check_inputs(self, inputs: ModelInputs) -> None:
        """Refuse rows without labels if MTP is to be trained, because it would not be."""
        if self.config.trains_mtp and self.training and torch.is_grad_enabled() and inputs.following is None:
            raise ValueError(
                "mtp_loss_scaling_factor is above 0 and the batch has no labels, expected labels, on every pipeline "
                "stage, or mtp_loss_scaling_factor=0, which keeps the weights of multi-token prediction as they are"
            )

    def embed(self, inputs: ModelInputs, encoded: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Like VisionLanguageModel's, with the embedded next tokens as additional payload for the last stage."""
        encoded = encoded or self.encode(inputs)
        hidden, layer_arguments = super().embed(inputs, encoded)
        if self._predicts(inputs):
            following = inputs.following
            layer_arguments = {_NEXT: self.embed_tokens(following.input_ids, encoded[0], following.fuse)}
        return hidden, layer_arguments

    def decode(
        self, inputs: ModelInputs, hidden: Tensor | None, layer_arguments: dict[str, Any], **arguments: Any
    ) -> Any:
        """Like VisionLanguageModel's, with the embedded next tokens."""
        prediction, _ = self.output_context(inputs, layer_arguments)
        return super().decode(inputs, hidden, {}, prediction=prediction, **arguments)

    def output_context(
        self, inputs: ModelInputs, layer_arguments: dict[str, Any]
    ) -> tuple[tuple[Tensor, NextTokens] | None, None]:
        """The embedded next tokens and what they are, if this batch has them."""
        embedded = layer_arguments.get(_NEXT)
        return None if embedded is None else (embedded, inputs.following), None

    def pack(self, hidden: Tensor, layer_arguments: dict[str, Any]) -> Tensor:
        """Hidden states, and embedded next tokens for the next stage."""
        if _NEXT not in layer_arguments:
            return super().pack(hidden, layer_arguments)
        return torch.cat((hidden, layer_arguments[_NEXT].to(hidden.dtype)))

    def unpack(self, received: Tensor, length: int, inputs: ModelInputs) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states and embedded next tokens."""
        if not self._predicts(inputs):
            return super().unpack(received, length, inputs)
        rows = len(inputs.input_ids)
        check_received(received, 2 * length * rows, f"{length} tokens of {rows} rows and as many next tokens")
        hidden, embedded = received.chunk(2)
        return hidden, {_NEXT: embedded}

    def _predicts(self, inputs: ModelInputs) -> bool:
        """Whether this batch has an MTP loss; not in evaluation, which does not report it."""
        return inputs.following is not None and self.training and torch.is_grad_enabled()
