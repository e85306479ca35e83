"""Forward step for Megatron-Bridge's loop: run one microbatch and return its losses.

Without `calculate_per_token_loss`, losses are divided by the number of tokens in the microbatch (`mean_of_microbatch`).
With it, megatron-core divides gradients by the number of tokens in the global batch, after the backward pass. Other
objectives than supervised training have their own loss functions (`preference.py`, `retrieval.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qwen3vl_bridge.config.fields import dist_train_replicas
from qwen3vl_bridge.core.batch import ModelInputs, TokenBatch, VisionRankInputs
from qwen3vl_bridge.core.device_transfer import Transferable, copy_to_gpu
from qwen3vl_bridge.dist_train.joint_run import next_vision_batch
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.common.schedule import ModelSchedulePlan
from qwen3vl_bridge.training.guard import record_losses
from qwen3vl_bridge.training.megatron_batches import from_collator
from qwen3vl_bridge.training.metrics import BatchCounts, count_flops, count_microbatch
from qwen3vl_bridge.training.objective_settings import RETRIEVAL, ObjectiveConfig, objective_of
from qwen3vl_bridge.training.preference import DocumentLosses, preference_loss, run_with_reference
from qwen3vl_bridge.training.retrieval import PooledDocuments, RetrievalLoss
from qwen3vl_bridge.training.run_validation import check_balance

import torch
from megatron.bridge.training.losses import create_masked_next_token_loss_function
from megatron.bridge.training.post_training.distillation import loss_func_kd
from megatron.bridge.training.state import GlobalState
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from modelopt.torch.distill import DistillationModel
from torch import Tensor


def forward_step(
    state: GlobalState,
    data_iterator: Iterator[TokenBatch | Mapping[str, Any]],
    model: torch.nn.Module,
    return_schedule_plan: bool = False,
) -> tuple[Tensor | ModelSchedulePlan, Callable]:
    """Run one microbatch: a `TokenBatch` on the host, or a dict from a collator of Megatron-Bridge.

    Returns:
        First, the losses [rows, tokens], or with `return_schedule_plan` the schedule plan that computes the losses.
        Second, the loss function. With `calculate_per_token_loss` it maps the losses to (sum of losses, number of
        tokens, values to report), otherwise to (contribution to the mean loss of the microbatch, values to report).

    Raises:
        ValueError: The batch is inconsistent or would train on wrong targets (see `from_collator`). Or other pipeline
            stages expect rows of another number or length. Or settings need callbacks that have not started.
    """
    check_balance(state.cfg)
    provider = get_model_config(model)
    if not provider.add_decoder:
        groups = get_attr_wrapped_model(model, "pg_collection")
        return encode(next_vision_batch(state, data_iterator, groups), state, model, groups), _no_loss
    batch = next(data_iterator)
    if not isinstance(batch, TokenBatch):
        batch = from_collator(batch, provider, state.cfg.dataset)
    check_rows(batch, provider, state.cfg.train.micro_batch_size)
    # With virtual pipeline parallelism every chunk receives each microbatch. Count a microbatch once.
    if model.training and not get_attr_wrapped_model(model, "vp_stage"):
        count_microbatch(state, batch, provider)
    inputs = to_device(get_attr_wrapped_model(model, "select_local")(batch), model)
    mask, checks = inputs.loss_mask, state.cfg.rerun_state_machine
    objective = objective_of(state.cfg)
    kind = "sft" if objective is None else objective.kind
    found = "sft" if batch.groups is None else batch.groups.objective
    if found != kind:
        raise ValueError(
            f"objective.kind is {kind!r}, but the batch has records for {found!r}: read the data with "
            f"Qwen3VLConversationProvider(objective={kind!r}), or set objective.kind={found}"
        )
    if objective is not None:
        output, count, mask = run_objective(objective, batch, inputs, model)
        return output, record_losses(count, state, batch, mask) if model.training else count
    count = create_masked_next_token_loss_function(mask, checks.check_for_nan_in_loss, checks.check_for_spiky_loss)
    student = get_attr_wrapped_model(
        model, "language_model", return_model_obj=True
    )  # also removes Megatron-FSDP's wrapper
    if isinstance(student, DistillationModel):
        count = functools.partial(loss_func_kd, loss_mask=mask, original_loss_fn=count, model=student)
    if model.training:
        count = record_losses(count, state, batch, mask)
    if not provider.calculate_per_token_loss:
        count = functools.partial(mean_of_microbatch, count, batch.loss_mask.sum().clamp(min=1).item())
    if return_schedule_plan:  # only with `overlap_moe_expert_parallel_comm`, where the model has no wrappers
        return model.build_schedule_plan(inputs=inputs), count
    return model(inputs=inputs), count


def run_objective(
    settings: ObjectiveConfig, batch: TokenBatch, inputs: ModelInputs, model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]], Tensor]:
    """Run a microbatch of another objective than supervised training.

    Returns:
        The model's output, the loss function, and the mask of tokens with a loss [b, s]. The loss function maps the
        output to (sum of losses, their number, values to report). Context-parallel ranks compute the same sum; only the
        first of them counts and reports it.
    """
    groups: ProcessGroupCollection = get_attr_wrapped_model(model, "pg_collection")
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


def mean_of_microbatch(count: Callable, tokens: float, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this rank's contribution to the mean loss of a microbatch, and the values to report.

    Args:
        count: maps the losses to (sum of losses, number of tokens, values to report).
        tokens: number of trained tokens in the microbatch, over all context-parallel ranks.
        losses: this rank's losses [rows, tokens].
    """
    loss, _, report = count(losses)
    return loss / tokens, report


def encode(
    batches: tuple[TokenBatch | Mapping[str, Any], ...],
    state: GlobalState,
    model: torch.nn.Module,
    groups: ProcessGroupCollection,
) -> dict[str, Tensor]:
    """Encode images on a vision rank, and return the tensor to send to the language ranks, by the module's name.

    `batches` has one microbatch for each language replica that this vision rank serves.
    """
    provider = get_model_config(model)
    replicas, work = dist_train_replicas(provider), provider.vision_work
    share = replicas.share_of(groups.dp.rank())
    packed = [b if isinstance(b, TokenBatch) else from_collator(b, provider, state.cfg.dataset) for b in batches]
    if model.training:
        for batch in packed:
            count_flops(state, BatchCounts() if share else BatchCounts.from_batch(batch, provider))
    return model(
        inputs=to_device(VisionRankInputs.from_batches(packed, work, replicas.vision_per_language, share), model)
    )


def _no_loss(_: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    raise ValueError("the loss function was called on a vision rank, expected only on language ranks")


def to_device[Inputs: Transferable](inputs: Inputs, model: torch.nn.Module) -> Inputs:
    """Copy the inputs to the device of the model's parameters."""
    device = next(model.parameters()).device
    return copy_to_gpu(inputs, device) if device.type == "cuda" else inputs.to(device)


def check_rows(batch: TokenBatch, provider: VisionLanguageProvider, rows: int) -> None:
    """Raise ValueError if other pipeline stages expect another number or length of rows than the batch has.

    Without this check, the stages would wait forever.
    """
    fixed = provider.pipeline_model_parallel_size > 1 and not provider.variable_seq_lengths
    if fixed and batch.layout.num_rows != rows:
        raise ValueError(
            f"a microbatch has {batch.layout.num_rows} rows, but later stages expect train.micro_batch_size, {rows}; "
            "change the batch, or set model.variable_seq_lengths=True"
        )
    tokens = batch.layout.total // batch.layout.num_rows
    if fixed and tokens != provider.seq_length:  # the length that the training loops pass to their schedule
        raise ValueError(
            f"rows have {tokens} tokens, but pipeline stages expect model.seq_length, {provider.seq_length}: pad rows "
            "to this length, or set model.variable_seq_lengths=True"
        )
