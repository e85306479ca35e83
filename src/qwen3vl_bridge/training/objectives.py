"""The forward pass and the loss function of a microbatch, for objectives other than supervised training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen3vl_bridge.core.batch import ModelInputs, TokenBatch
from qwen3vl_bridge.core.device_transfer import Transferable
from qwen3vl_bridge.training.objective_settings import RETRIEVAL, ObjectiveConfig
from qwen3vl_bridge.training.preference import DocumentLosses, preference_loss, run_with_reference
from qwen3vl_bridge.training.retrieval import PooledDocuments, RetrievalLoss

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor


def run_objective(
    settings: ObjectiveConfig,
    batch: TokenBatch,
    inputs: ModelInputs,
    model: torch.nn.Module,
    to_device: Callable[[Transferable, torch.nn.Module], Any],
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]], Tensor]:
    """Run a microbatch, and return the model's output, the loss function, and the mask of tokens with a loss [b, s].

    The loss function maps the output to (sum of losses, their number, values to report). Context-parallel ranks compute
    the same sum; only the first of them counts and reports it.

    Raises:
        ValueError: the records of the batch are for another objective.
    """
    groups: ProcessGroupCollection = get_attr_wrapped_model(model, "pg_collection")
    found = "sft" if batch.groups is None else batch.groups.objective
    if found != settings.kind:
        raise ValueError(
            f"objective.kind is {settings.kind!r}, but the batch has records for {found!r}: read the data with "
            f"Qwen3VLConversationProvider(objective={settings.kind!r}), or set objective.kind={found}"
        )
    if settings.kind in RETRIEVAL:
        pooled = to_device(PooledDocuments.from_batch(batch, model), model)
        output = model(inputs=inputs.without_labels(), output_processor=pooled.pool_or_score)
        return output, RetrievalLoss(settings, pooled), pooled.mask
    documents, reference = to_device(DocumentLosses.from_batch(batch, groups), model), None
    if documents.reference is None:
        output, reference = run_with_reference(model, inputs)
    else:
        output = model(inputs=inputs)
    assert inputs.loss_mask is not None
    return output, preference_loss(settings, documents, reference, groups), inputs.loss_mask
