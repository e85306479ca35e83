"""megatron-core's multi-token prediction (MTP) with embeddings that are computed beforehand.

Overridden: `MultiTokenPredictionLayer._get_embeddings`, which rolls token ids and embeds them, and so does not support
images. Called: `_compute_mtp_acceptance_counts`, which counts correct predictions from logits that are sharded over
tensor-parallel ranks. Delete the class when megatron-core's layer accepts embeddings, the function when it is exported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer, _compute_mtp_acceptance_counts
from torch import Tensor
from torch.distributed import ProcessGroup


class EmbeddedPredictionLayer(MultiTokenPredictionLayer):
    """Multi-token prediction layer that takes embedded next tokens [tokens, rows, hidden] as `embedding`."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Tensor,
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        return input_ids, position_ids, padding_mask, embedding, hidden_states


def count_correct_predictions(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    output_layer: Callable[..., Any],
    gather: bool | None,
    tp_group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Return the number of correct predictions among the tokens in the mask, and the number of tokens in the mask.

    Logits are [tokens, rows, vocabulary], or this rank's part of the vocabulary; labels and mask are [rows, tokens].
    """
    return _compute_mtp_acceptance_counts(logits, labels, mask, output_layer, gather, tp_group)
