"""The forward step of Megatron-Bridge's loop: runs one microbatch through the model, and says by what its losses are
divided: by the microbatch's tokens (`mean_of_microbatch`), or with `calculate_per_token_loss` by those of the global
batch, which megatron-core does to the gradients after the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qwen3vl_bridge.batch import TokenBatch, VisionRankInputs
from qwen3vl_bridge.batch.device_transfer import Movable, copy_to_gpu
from qwen3vl_bridge.dist_train.joint_run import next_vision_batch
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.schedule_plan import ModelSchedulePlan
from qwen3vl_bridge.models.settings import replicas_of
from qwen3vl_bridge.training.guard import recorded
from qwen3vl_bridge.training.megatron_batches import from_collator
from qwen3vl_bridge.training.metrics import Amounts, count_microbatch, count_operations
from qwen3vl_bridge.training.run_refusals import check_balance

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
    """Run one microbatch: a `TokenBatch` on the host, or a dict as produced by Megatron-Bridge's collators.

    Returns:
        The per-token losses [b, s], or with `return_schedule_plan` the plan that computes them, and a function that
        maps them to (sum of the unmasked losses, their number, values to report), or without `calculate_per_token_loss`
        to (this rank's contribution to the mean over the microbatch, values to report). In the first case megatron-core
        divides the summed gradients by the number of tokens of the whole global batch (`finalize_model_grads`).

    Raises:
        ValueError: a collator's batch that is inconsistent or would train on wrong targets, see `from_collator`; a
            number of assigned rows that differs from the global batch, or rows that pipeline stages do not expect;
            settings that are implemented by callbacks, if no callback was started.
    """
    check_balance(state.cfg)
    config, groups = get_model_config(model), get_attr_wrapped_model(model, "pg_collection")
    if not config.add_decoder:
        return encode(next_vision_batch(state, data_iterator, groups), state, model, groups), _no_loss
    batch = next(data_iterator)
    if not isinstance(batch, TokenBatch):
        batch = from_collator(batch, config, state.cfg.dataset)
    check_rows(batch, config, state.cfg.train.micro_batch_size)
    # With virtual pipeline parallelism, every stage receives each microbatch.
    if model.training and not get_attr_wrapped_model(model, "vp_stage"):
        count_microbatch(state, batch, config)
    encodes = get_attr_wrapped_model(model, "pre_process")
    inputs = to_device(batch.local(**config.local_arguments(groups), encodes=encodes), model)
    mask, checks = inputs.loss_mask, state.cfg.rerun_state_machine
    count = create_masked_next_token_loss_function(mask, checks.check_for_nan_in_loss, checks.check_for_spiky_loss)
    student = get_attr_wrapped_model(model, "language_model", return_model_obj=True)  # Megatron-FSDP's wrapper too
    if isinstance(student, DistillationModel):
        count = functools.partial(loss_func_kd, loss_mask=mask, original_loss_fn=count, model=student)
    if model.training:
        count = recorded(count, state, batch, mask)
    if not config.calculate_per_token_loss:
        count = functools.partial(mean_of_microbatch, count, batch.loss_mask.sum().clamp(min=1).item())
    if return_schedule_plan:  # for `overlap_moe_expert_parallel_comm`, a model without its wrappers
        return model.build_schedule_plan(inputs=inputs), count
    return model(inputs=inputs), count


def mean_of_microbatch(count: Callable, tokens: float, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's contribution to the mean loss over a microbatch's trained tokens (`tokens` on all context-parallel
    ranks), and the values to report; `losses` [b, s] are this rank's.

    Returns two results, because megatron-core then multiplies the loss by the context-parallel size before it averages
    over all ranks. With three results it divides by the rank's own number of tokens, which gives a mean of per-rank
    means that depends on how tokens are distributed.
    """
    loss, _, report = count(losses)
    return loss / tokens, report


def encode(
    batches: tuple[TokenBatch | Mapping[str, Any], ...],
    state: GlobalState,
    model: torch.nn.Module,
    groups: ProcessGroupCollection,
) -> dict[str, Tensor]:
    """Encode one microbatch of each language replica that this rank of the vision tower serves, for the schedule to
    send.
    """
    config = get_model_config(model)
    replicas, work = replicas_of(config), config.vision_work
    share = replicas.share_of(groups.dp.rank())
    packed = [b if isinstance(b, TokenBatch) else from_collator(b, config, state.cfg.dataset) for b in batches]
    if model.training:
        for batch in packed:
            count_operations(state, Amounts() if share else Amounts.of(batch, config))
    return model(inputs=to_device(VisionRankInputs.of(packed, work, replicas.vision_per_language, share), model))


def _no_loss(_: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    raise ValueError("a rank of the vision tower was asked for a loss, expected only language ranks to be asked")


def to_device[Inputs: Movable](inputs: Inputs, model: torch.nn.Module) -> Inputs:
    """Move the model's inputs to the device of its parameters."""
    device = next(model.parameters()).device
    return copy_to_gpu(inputs, device) if device.type == "cuda" else inputs.to(device)


def check_rows(batch: TokenBatch, config: VisionLanguageProvider, rows: int) -> None:
    """Refuse row counts (other than `rows`) or lengths that pipeline stages do not expect: other stages would hang."""
    fixed = config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths
    if fixed and batch.layout.num_rows != rows:
        raise ValueError(
            f"a microbatch has {batch.layout.num_rows} rows, expected train.micro_batch_size, {rows}, between pipeline "
            "stages; or set model.variable_seq_lengths=True"
        )
    tokens = batch.layout.total // batch.layout.num_rows
    if fixed and tokens != config.seq_length:  # the length that the training loops pass to their schedule
        raise ValueError(
            f"rows have {tokens} tokens, expected model.seq_length, {config.seq_length}, between pipeline stages; or "
            "set model.variable_seq_lengths=True"
        )
