"""How a model is split: settings that would fail in the middle of a run's first step, or train something else.

What lives here: their checks, on plain numbers. What may not: fields (`fields.py`), groups, modules.
What megatron-core and Megatron-Bridge refuse clearly by themselves, when a configuration is finalised, is left to them:
text heads and query groups that don't fit tensor parallelism, expert parallelism without experts, uneven pipeline
stages and layouts that don't add up. Query groups may be fewer than tensor-parallel ranks, if they divide them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from qwen3vl_bridge.batch.token_layout import row_multiple
from qwen3vl_bridge.models.common.settings.fields import VisionLanguageFields
from qwen3vl_bridge.models.common.settings.kernels import PACKED_CONTEXT

import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.utils import get_te_version, is_te_min_version

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig

logger = logging.getLogger(__name__)

_LOCAL_CONTEXT = {None, "all_gather"}
_CONTEXT = {None, "p2p", "all_gather", "a2a"}
LOGITS = "a loss of gathered logits gives wrong gradients"
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def check_sizes(provider: VisionLanguageFields) -> None:
    """Check what everything is divided by, before megatron-core divides.

    Raises:
        ValueError: a number of ranks below 1.
    """
    for name in SIZES:
        size = getattr(provider, name)
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}, expected 1 or more")


def complete_parallel(provider: VisionLanguageFields) -> None:
    """Turn on what experts and split rows need, as Megatron-Bridge does, and say so; warn of what depends on it."""
    tensor, context = provider.tensor_model_parallel_size, provider.context_parallel_size
    if provider.moe_layers and tensor > 1 and not provider.sequence_parallel:
        logger.info(
            "sequence_parallel is set to True: megatron-core trains experts under tensor_model_parallel_size %d in no "
            "other way",
            tensor,
        )
        provider.sequence_parallel = True
    if provider.calculate_per_token_loss is None:
        provider.calculate_per_token_loss = context > 1 or bool(provider.dist_train.use_dist_train)
        logger.info(
            "calculate_per_token_loss is set to %s, as Megatron-Bridge's provider has it; True weighs all tokens of a "
            "global batch alike, False all microbatches",
            provider.calculate_per_token_loss,
        )
    if context > 1 and not provider.calculate_per_token_loss:
        logger.warning(
            "calculate_per_token_loss is False on %d context-parallel ranks: the loss of a step that returns three "
            "values is divided by each rank's own tokens, wherever they lie. Expected two: a rank's part of the mean, "
            "and what to report, as this package's step does; or calculate_per_token_loss=True",
            context,
        )


def complete_ddp(provider: VisionLanguageFields, ddp: DistributedDataParallelConfig | None) -> None:
    """Have gradients added up where losses are divided by tokens; Megatron-Bridge's recipes have them averaged."""
    if ddp is not None and ddp.average_in_collective and provider.calculate_per_token_loss:
        logger.info(
            "ddp.average_in_collective is set to False: with calculate_per_token_loss gradients of ranks are added up, "
            "and divided by the tokens of the global batch"
        )
        ddp.average_in_collective = False


def check_parallel(provider: VisionLanguageFields) -> None:
    """Check a provider whose fields megatron-core has completed.

    Raises:
        ValueError: sizes that don't divide, or ways of splitting that this model or the schedules don't have.
    """
    _check_widths(provider)
    _check_experts(provider)
    _check_stages(provider)
    _check_rows(provider)
    if provider.context_parallel_size > 1:
        _check_context(provider)


def check_training(provider: VisionLanguageFields) -> None:
    """Check what matters to a model that is built to be trained, and to no other.

    How many microbatches interleaved stages take is `check_microbatches`' question.

    A model that is loaded to be exported or asked may carry settings of schedules from the run that saved it.

    Raises:
        ValueError: pipeline stages would not know the size of what they receive, or mix up what they send each other;
            or a loss would give wrong gradients.
    """
    _check_between_stages(provider)
    tensor, taps = provider.tensor_model_parallel_size, len(provider.tapped_layers)
    layers = _layers_of_first_stage(provider)
    if provider.pipeline_model_parallel_size > 1 and layers < taps and not provider.variable_seq_lengths:
        raise ValueError(
            f"variable_seq_lengths is False and the first pipeline stage has {layers} layers, expected True, or at "
            f"least {taps} layers: DeepStack features go to the first {taps}, and what stages send each other grows "
            "with the pictures of a row"
        )
    if tensor > 1 and not provider.parallel_output:
        raise ValueError(f"parallel_output is False, expected True under tensor_model_parallel_size {tensor}: {LOGITS}")


def check_microbatches(provider: VisionLanguageFields, microbatches: int, what: str) -> None:
    """Check how many microbatches a step of interleaved stages has.

    Args:
        provider: a finalised one.
        microbatches: of one data-parallel rank.
        what: has them, for the message.

    Raises:
        ValueError: megatron-core's schedule does not take so many.
    """
    group = schedule_group(provider)
    stages, rest = provider.pipeline_model_parallel_size, microbatches % group
    if microbatches < group or 0 < rest < stages:
        raise ValueError(
            f"{what} has {microbatches} microbatches on each data-parallel rank, expected a multiple of {group}, or "
            f"{stages} or more beyond one: interleaved stages take them in groups "
            "(model.microbatch_group_size_per_vp_stage)"
        )


def schedule_group(provider: VisionLanguageFields) -> int:
    """Microbatches that interleaved stages take together; 1 where stages are not interleaved."""
    if provider.virtual_pipeline_model_parallel_size is None:
        return 1
    return provider.microbatch_group_size_per_vp_stage or provider.pipeline_model_parallel_size


def _layers_of_first_stage(provider: VisionLanguageFields) -> int:
    """Text layers of the stage that embeds, or of its first chunk."""
    layout = provider.pipeline_model_parallel_layout
    if layout is not None:  # of which megatron-core asks the rank, and there may be no ranks yet
        return layout.layout[0][0].count(LayerType.decoder)
    return get_num_layers_to_build(provider, 0 if provider.virtual_pipeline_model_parallel_size else None, 0)


def _check_widths(provider: VisionLanguageFields) -> None:
    tensor = provider.tensor_model_parallel_size
    widths = {"padded_vocab_size": provider.padded_vocab_size}  # should_pad_vocab pads it
    if not provider.dist_train.use_dist_train:
        widths |= vision_widths(provider)
    if len(provider.moe_layers) < provider.num_layers:
        widths["ffn_hidden_size"] = provider.ffn_hidden_size
    for name, width in widths.items():
        if width % tensor:
            raise ValueError(f"{name} is {width}, expected a multiple of tensor_model_parallel_size, {tensor}")


def vision_widths(provider: VisionLanguageFields) -> dict[str, int]:
    """What of the vision tower its tensor-parallel ranks divide among them."""
    vision = provider.vision_config
    return {
        "vision_config.num_heads": vision.num_heads,
        "vision_config.intermediate_size": vision.intermediate_size,
        "vision_config.hidden_size * spatial_merge_size ** 2": vision.hidden_size * vision.spatial_merge_size**2,
    }


def _check_experts(provider: VisionLanguageFields) -> None:
    tensor, of_experts = provider.tensor_model_parallel_size, provider.expert_tensor_parallel_size
    if not provider.moe_layers:
        if of_experts not in (1, tensor):
            raise ValueError(f"expert_tensor_parallel_size is {of_experts}, expected None: this model has no experts")
    elif provider.moe_ffn_hidden_size % of_experts:
        raise ValueError(
            f"moe_ffn_hidden_size is {provider.moe_ffn_hidden_size}, expected a multiple of "
            f"expert_tensor_parallel_size, {of_experts}"
        )


def _check_stages(provider: VisionLanguageFields) -> None:
    """Where no setting says how layers are dealt out, megatron-core finds out while it builds them."""
    stages, chunks = provider.pipeline_model_parallel_size, provider.virtual_pipeline_model_parallel_size
    if stages == 1 and (chunks or 1) > 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {chunks} with pipeline_model_parallel_size 1, expected None: "
            "there are no stages to cut into chunks"
        )
    dealt_out = (
        provider.pipeline_model_parallel_layout,
        provider.num_layers_in_first_pipeline_stage,
        provider.num_layers_in_last_pipeline_stage,
        provider.account_for_embedding_in_pipeline_split or None,
        provider.account_for_loss_in_pipeline_split or None,
    )
    parts = stages * (chunks or 1)
    if all(setting is None for setting in dealt_out) and provider.num_layers % parts:
        times = f" times virtual_pipeline_model_parallel_size, {chunks}" if chunks else ""
        raise ValueError(
            f"num_layers is {provider.num_layers}, expected a multiple of pipeline_model_parallel_size, {stages}{times}"
            "; or stages that differ: set pipeline_model_parallel_layout, num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage, or account_for_embedding_in_pipeline_split and "
            "account_for_loss_in_pipeline_split"
        )


def _check_between_stages(provider: VisionLanguageFields) -> None:
    """What the schedules refuse in the first step, or get wrong.

    Megatron-Bridge's `comm_overlap` writes `overlap_p2p_comm` and `batch_p2p_comm` before it finalises the model.
    """
    stages, chunks = provider.pipeline_model_parallel_size, provider.virtual_pipeline_model_parallel_size
    if stages == 1:
        return
    overlap, batch = provider.overlap_p2p_comm, provider.batch_p2p_comm
    sent = torch.float32 if provider.fp32_residual_connection else provider.params_dtype
    if provider.pipeline_dtype != sent:
        raise ValueError(
            f"pipeline_dtype is {provider.pipeline_dtype}, expected {sent}, in which stages have their output"
        )
    found = f"overlap_p2p_comm is {overlap} and batch_p2p_comm {batch} with "
    if overlap and chunks is None:
        raise ValueError(
            f"{found}pipeline_model_parallel_size {stages}, expected overlap_p2p_comm=False without "
            "virtual_pipeline_model_parallel_size: the schedule has nothing to overlap"
        )
    if overlap and batch:
        raise ValueError(f"{found}pipeline_model_parallel_size {stages}, expected at most one of the two")
    if stages == 2 and (chunks or 1) > 1 and not overlap:
        # Of two stages each is before and behind the other. A batch takes what comes from before for what comes from
        # behind, and nothing fails: the gradients are wrong. One by one, they wait for each other for ever.
        raise ValueError(
            f"{found}virtual_pipeline_model_parallel_size {chunks} and pipeline_model_parallel_size 2, expected "
            "overlap_p2p_comm=True and batch_p2p_comm=False: stages would mix up what they send each other"
        )
    group = provider.microbatch_group_size_per_vp_stage
    if chunks is not None and group is not None and group < stages:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {group}, expected at least pipeline_model_parallel_size, {stages}"
        )


def _check_rows(provider: VisionLanguageFields) -> None:
    context = provider.context_parallel_size
    sequence = provider.tensor_model_parallel_size if provider.sequence_parallel else 1
    multiple = row_multiple(context, sequence)
    if provider.seq_length % multiple:
        raise ValueError(
            f"seq_length is {provider.seq_length}, expected a multiple of {multiple}: rows are shared by "
            f"{context} context-parallel ranks, and each part by {sequence} sequence-parallel ones"
        )


def _check_context(provider: VisionLanguageFields) -> None:
    """`cp_comm_type`, for all layers or for each.

    Without Transformer Engine there is one way, which gathers keys and values once a layer. With it, "p2p" (the
    default) takes packed rows, "a2a" and "all_gather" in later releases. "a2a+p2p" takes none, and a single padded row
    is a packed row here.
    """
    kinds = provider.cp_comm_type
    found = set(kinds) if isinstance(kinds, list) else {kinds}
    ranks, local = provider.context_parallel_size, provider.transformer_impl == "local"
    if unknown := found - (_LOCAL_CONTEXT if local else _CONTEXT):
        why = "keys and values are gathered, as transformer_impl is 'local'" if local else "packed rows have no other"
        expected = ", ".join(sorted(map(repr, (_LOCAL_CONTEXT if local else _CONTEXT) - {None})))
        raise ValueError(f"cp_comm_type has {sorted(unknown, key=str)}, expected None or {expected}: {why}")
    for kind, release in PACKED_CONTEXT.items():
        if not local and kind in found and not is_te_min_version(release):
            raise ValueError(
                f"cp_comm_type {kind!r} takes packed rows from Transformer Engine {release} on, and {get_te_version()} "
                "is installed: expected 'p2p', or a later one"
            )
    tensor = provider.tensor_model_parallel_size
    groups = max(provider.num_query_groups // tensor, 1)
    if "a2a" in found and (groups % ranks or provider.num_attention_heads // tensor % ranks):
        raise ValueError(
            f"cp_comm_type 'a2a' deals heads out to context_parallel_size {ranks}, expected a divisor of "
            f"{groups}, the query groups of each tensor-parallel rank; or use 'p2p'"
        )
