"""Multi-token prediction (MTP): an additional layer that predicts the token after the next, and its loss.

For each token, the layer's input combines the next token's embedding (its vision token, if it is part of an image)
with the token's own hidden state after the final norm; position ids are the token's own. Embedding and output layer are
shared with the model. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; for vision tokens vLLM's qwen3_5_mtp, the
implementation that serves these weights.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.batch.packed_batch import NextTokens
from qwen3vl_bridge.models.chunked_loss import Head, token_losses
from qwen3vl_bridge.models.layer_specs import backend
from qwen3vl_bridge.models.model import MRopeGPTModel

import torch
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
    """Spec of the MTP block with its single layer.

    Args:
        config: the provider.
        layer: spec of a decoder layer with full attention.
    """
    modules = backend(config)
    norm = modules.layer_norm(rms_norm=True)
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=norm,
        hnorm=norm,
        layer_norm=norm,
        eh_proj=modules.column_parallel_linear(),
        mtp_model_layer=layer,
    )
    spec = ModuleSpec(module=NextTokenLayer, submodules=submodules)
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[spec])
    )


def with_mtp_loss(
    model: MRopeGPTModel, hidden: Tensor, embedded: Tensor, following: NextTokens, arguments: dict[str, Any]
) -> Tensor:
    """Attach the MTP loss to hidden states: their backward pass also computes its gradient.

    A token's MTP loss is weighted by `mtp_loss_scaling_factor` relative to its own loss, regardless of how tokens are
    split and packed. megatron-core additionally weights a microbatch by the ratio of trained to predicted tokens, which
    is 1 if every answer is preceded by at least two tokens.

    Args:
        model: the text model of a stage with an output layer.
        hidden: [s / sp, b, h] after the final norm.
        embedded: [s / sp, b, h] next tokens.
        following: labels, masks and counts for the next tokens.
        arguments: those of `GPTModel._postprocess`.
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
    losses, *accepted = _losses(model, predicted, following, arguments["runtime_gather_output"])
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


def _losses(
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
