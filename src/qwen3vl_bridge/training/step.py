"""The forward step: one microbatch through the model, and how its loss counts.

What lives here: the function that Megatron-Bridge's loop and ours call, with Megatron-Bridge's signature. What may
not: the loop (`loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qwen3vl_bridge.parallel import sequence_ranks
from qwen3vl_bridge.provider import Qwen3VLModelProvider
from qwen3vl_bridge.sequence import PackedBatch
from qwen3vl_bridge.training.foreign_batch import from_collator
from qwen3vl_bridge.training.meter import count_microbatch
from qwen3vl_bridge.training.watch import watched

import torch
from megatron.bridge.training.losses import create_masked_next_token_loss_function
from megatron.bridge.training.state import GlobalState
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor


def forward_step(
    state: GlobalState,
    data_iterator: Iterator[PackedBatch | Mapping[str, Any]],
    model: torch.nn.Module,
    return_schedule_plan: bool = False,
) -> tuple[Tensor, Callable]:
    """Run one microbatch.

    Args:
        state: the run; its configuration says what is checked in a loss.
        data_iterator: gives `PackedBatch`es on the host, or dicts as Megatron-Bridge's collators make them.
        model: Qwen3VLModel, wrapped or not.
        return_schedule_plan: Megatron's request for a plan instead, of a kind of overlap this model does not have.

    Returns:
        The losses [b, s], and a function from them to (sum of the losses that count, how many, what to report).

    Raises:
        NotImplementedError: a schedule plan is asked for.
        ValueError: a collator's batch that contradicts itself or would train on something else, see `foreign_batch`;
            rows that are dealt out over more or less than global batches, or that pipeline stages don't expect;
            settings that callbacks follow, where none has started.
    """
    if return_schedule_plan:
        raise NotImplementedError(
            "overlap_moe_expert_parallel_comm is on; this model has no schedule plan, turn it off"
        )
    _check_balance(state.cfg)
    config, groups = get_model_config(model), get_attr_wrapped_model(model, "pg_collection")
    batch = next(data_iterator)
    if not isinstance(batch, PackedBatch):
        batch = from_collator(batch, config, state.cfg.dataset)
    check_rows(batch, config, state.cfg.train.micro_batch_size)
    # Each virtual pipeline stage sees every microbatch.
    if model.training and not get_attr_wrapped_model(model, "vp_stage"):
        count_microbatch(state, batch, config)
    ranks = sequence_ranks(config, groups)
    if get_attr_wrapped_model(model, "pre_process"):
        inputs = batch.local(**ranks)
    else:
        inputs = batch.local(**ranks | dict(vision_work=None)).without_pictures()
    device = next(model.parameters()).device
    if device.type == "cuda":
        inputs = inputs.pin_memory()  # the copy would make the host wait otherwise
    inputs = inputs.to(device, non_blocking=True)
    checks = state.cfg.rerun_state_machine
    count = create_masked_next_token_loss_function(
        inputs.loss_mask, checks.check_for_nan_in_loss, checks.check_for_spiky_loss
    )
    if model.training:
        count = watched(count, state, batch, inputs.loss_mask)
    return model(inputs=inputs), count


def check_rows(batch: PackedBatch, config: Qwen3VLModelProvider, rows: int) -> None:
    """Refuses more or fewer rows than pipeline stages expect, who would wait for the rest of them.

    How long rows are is checked by the model.

    Args:
        batch: a microbatch.
        config: the provider.
        rows: of a microbatch.
    """
    fixed = config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths
    if fixed and batch.layout.num_rows != rows:
        raise ValueError(
            f"a microbatch has {batch.layout.num_rows} rows, expected train.micro_batch_size, {rows}, between pipeline "
            "stages; or set model.variable_seq_lengths=True"
        )


def _check_balance(cfg: Any) -> None:
    """Refuses rows dealt out among those of several steps: a step would sum over others at each number of ranks."""
    over = getattr(cfg.dataset, "balance_over", None)
    if over is None:
        return
    batch = cfg.train.global_batch_size
    if batch % over or cfg.train.rampup_batch_size is not None:
        ramp = "" if cfg.train.rampup_batch_size is None else f", rampup_batch_size {cfg.train.rampup_batch_size}"
        raise ValueError(
            f"dataset.balance_over is {over} with train.global_batch_size {batch}{ramp}: expected the global batch "
            "size, which stays the same"
        )
