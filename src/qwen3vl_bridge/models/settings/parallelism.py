"""Parallel sizes: settings that would fail in the middle of a run's first step, or train something else.

What megatron-core and Megatron-Bridge refuse clearly when a configuration is finalised is not repeated here: text heads
and query groups that are not divisible by tensor parallelism, expert parallelism without experts, uneven pipeline
stages and inconsistent layouts. Query groups may be fewer than tensor-parallel ranks, if they divide them.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from qwen3vl_bridge.batch.token_layout import row_multiple
from qwen3vl_bridge.models.settings.fields import VisionLanguageFields
from qwen3vl_bridge.models.settings.kernels import PACKED_CONTEXT
from qwen3vl_bridge.models.settings.rules import Row, Rule, When, any_of, at_least, check, multiple_of, under

import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.utils import get_te_version, is_te_min_version

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig

logger = logging.getLogger(__name__)

LOGITS = "a loss on gathered logits gives wrong gradients"


def complete_parallel(provider: VisionLanguageFields) -> None:
    """Turn on what experts and split rows need, as Megatron-Bridge does, and log it; warn about settings that depend on
    it.
    """
    tensor, context = provider.tensor_model_parallel_size, provider.context_parallel_size
    if provider.moe_layers and tensor > 1 and not provider.sequence_parallel:
        logger.info(
            "sequence_parallel is set to True: megatron-core requires it to train experts with "
            "tensor_model_parallel_size %d",
            tensor,
        )
        provider.sequence_parallel = True
    if provider.calculate_per_token_loss is None:
        provider.calculate_per_token_loss = context > 1 or bool(provider.dist_train.use_dist_train)
        logger.info(
            "calculate_per_token_loss is set to %s, as in Megatron-Bridge's provider; True weights all tokens of a "
            "global batch equally, False all microbatches",
            provider.calculate_per_token_loss,
        )
    if context > 1 and not provider.calculate_per_token_loss:
        logger.warning(
            "calculate_per_token_loss is False on %d context-parallel ranks: if a forward step's loss function "
            "returns three values, the loss is divided by the number of tokens on each rank, which depends on how "
            "rows are split. Expected two values, the rank's part of the mean and what to report, as from this "
            "package's forward step; or calculate_per_token_loss=True",
            context,
        )


def complete_ddp(provider: VisionLanguageFields, ddp: DistributedDataParallelConfig | None) -> None:
    """Sum gradients if losses are divided by tokens; Megatron-Bridge's recipes average them."""
    if ddp is not None and ddp.average_in_collective and provider.calculate_per_token_loss:
        logger.info(
            "ddp.average_in_collective is set to False: with calculate_per_token_loss, gradients are summed over "
            "ranks and divided by the tokens of the global batch"
        )
        ddp.average_in_collective = False


def complete_sharded(provider: VisionLanguageFields) -> None:
    """Under Megatron-FSDP, turn off fused gradients of weights that are used more than once, and log it.

    There megatron-core's layers overwrite a weight's `main_grad`, and drop the gradient from autograd: the output layer
    would learn only from the last chunk, and tied embeddings from only one of their two uses.
    """
    uses = {
        "loss_chunk_tokens": provider.loss_chunk_tokens,
        "mtp_loss_scaling_factor": provider.trains_mtp,
        "share_embeddings_and_output_weights": provider.share_embeddings_and_output_weights,
    }
    if provider.gradient_accumulation_fusion and (names := [name for name, used in uses.items() if used]):
        logger.warning(
            "gradient_accumulation_fusion is True and is set to False: with %s the output layer's weight gets several "
            "gradients in a microbatch, and Megatron-FSDP would keep only the last",
            " and ".join(names),
        )
        provider.gradient_accumulation_fusion = False


def check_ranks(provider: VisionLanguageFields, world: int) -> None:
    """Check that the parallel sizes divide the number of processes; modules on separate ranks are not checked here.

    Args:
        provider: finalised or not.
        world: number of processes.

    Raises:
        ValueError: the number is not a multiple of their product.
    """
    if provider.dist_train.use_dist_train:
        return
    check(SIZES, provider)
    sizes = {
        "tensor": provider.tensor_model_parallel_size,
        "pipeline": provider.pipeline_model_parallel_size,
        "context": provider.context_parallel_size,
    }
    product = math.prod(sizes.values())
    if world % product:
        written = " * ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"the run has {world} process{'es' if world > 1 else ''}, expected a multiple of {product}, the product of "
            f"the parallel sizes ({written}): use torchrun --nproc_per_node {product}, or change the sizes, such as "
            "model.tensor_model_parallel_size=1 model.sequence_parallel=False"
        )


def check_microbatches(provider: VisionLanguageFields, microbatches: int, what: str) -> None:
    """Check the number of microbatches in a step of interleaved stages.

    Args:
        provider: a finalised one.
        microbatches: of one data-parallel rank.
        what: has them, for the message.

    Raises:
        ValueError: a number that megatron-core's schedule does not support.
    """
    group = schedule_group(provider)
    stages, rest = provider.pipeline_model_parallel_size, microbatches % group
    if microbatches < group or 0 < rest < stages:
        raise ValueError(
            f"{what} has {microbatches} microbatches on each data-parallel rank, expected a multiple of {group}, or a "
            f"remainder of at least {stages}: interleaved stages process them in groups "
            "(model.microbatch_group_size_per_vp_stage)"
        )


def schedule_group(provider: VisionLanguageFields) -> int:
    """Microbatches that interleaved stages process together; 1 if stages are not interleaved."""
    if provider.virtual_pipeline_model_parallel_size is None:
        return 1
    return provider.microbatch_group_size_per_vp_stage or provider.pipeline_model_parallel_size


def _check_expert_ranks(provider: VisionLanguageFields) -> None:
    of_experts = provider.expert_tensor_parallel_size
    if not provider.moe_layers and of_experts not in (1, provider.tensor_model_parallel_size):
        raise ValueError(f"expert_tensor_parallel_size is {of_experts}, expected None: this model has no experts")


def _check_rows(provider: VisionLanguageFields) -> None:
    context = provider.context_parallel_size
    sequence = provider.tensor_model_parallel_size if provider.sequence_parallel else 1
    multiple = row_multiple(context, sequence)
    if provider.seq_length % multiple:
        raise ValueError(
            f"seq_length is {provider.seq_length}, expected a multiple of {multiple}: rows are split over {context} "
            f"context-parallel ranks, and each part over {sequence} sequence-parallel ranks"
        )


def _check_context_kernels(provider: VisionLanguageFields) -> None:
    """Check that the context-parallel kernels support packed rows; a single padded row counts as packed here."""
    ranks, tensor, kinds = provider.context_parallel_size, provider.tensor_model_parallel_size, provider.cp_comm_type
    if ranks == 1 or provider.transformer_impl == "local":
        return
    found = set(kinds) if isinstance(kinds, list) else {kinds}
    for kind, release in PACKED_CONTEXT.items():
        if kind in found and not is_te_min_version(release):
            raise ValueError(
                f"cp_comm_type {kind!r} supports packed rows from Transformer Engine {release} on, and "
                f"{get_te_version()} is installed: expected 'p2p', or a later version"
            )
    groups = max(provider.num_query_groups // tensor, 1)
    if "a2a" in found and (groups % ranks or provider.num_attention_heads // tensor % ranks):
        raise ValueError(
            f"cp_comm_type 'a2a' divides heads over context_parallel_size {ranks}, expected a divisor of "
            f"{groups}, the query groups of each tensor-parallel rank; or use 'p2p'"
        )


def _check_sent_type(provider: VisionLanguageFields) -> None:
    sent = torch.float32 if provider.fp32_residual_connection else provider.params_dtype
    if provider.pipeline_model_parallel_size > 1 and provider.pipeline_dtype != sent:
        raise ValueError(
            f"pipeline_dtype is {provider.pipeline_dtype}, expected {sent}, the dtype of the stages' output"
        )


def _check_groups(provider: VisionLanguageFields) -> None:
    stages, group = provider.pipeline_model_parallel_size, provider.microbatch_group_size_per_vp_stage
    if provider.virtual_pipeline_model_parallel_size is not None and group is not None and group < stages:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {group}, expected at least pipeline_model_parallel_size, {stages}"
        )


def _check_taps(provider: VisionLanguageFields) -> None:
    taps, layers = len(provider.deepstack_layers), _layers_of_first_stage(provider)
    if provider.pipeline_model_parallel_size > 1 and layers < taps and not provider.variable_seq_lengths:
        raise ValueError(
            f"variable_seq_lengths is False and the first pipeline stage has {layers} layers, expected True, or at "
            f"least {taps} layers: DeepStack features are added after the first {taps}, and the size of what stages "
            "send each other depends on a row's images"
        )


def _layers_of_first_stage(provider: VisionLanguageFields) -> int:
    """Text layers of the stage that embeds, or of its first chunk."""
    layout = provider.pipeline_model_parallel_layout
    if layout is not None:  # megatron-core would need the rank, and there may be no ranks yet
        return layout.layout[0][0].count(LayerType.decoder)
    return get_num_layers_to_build(provider, 0 if provider.virtual_pipeline_model_parallel_size else None, 0)


# Dimensions of the vision tower that its tensor-parallel ranks divide.
VISION_WIDTHS = (
    "vision_config.num_heads",
    "vision_config.intermediate_size",
    "vision_config.hidden_size * vision_config.spatial_merge_size * vision_config.spatial_merge_size",
)
_TENSOR, _STAGES, _CHUNKS = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "virtual_pipeline"))
_OTHERS = ("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")

# Divisors, checked before megatron-core divides by them.
SIZES: tuple[Rule, ...] = tuple(Row(name, at_least(1), also=(None,)) for name in (_TENSOR, _STAGES, _CHUNKS, *_OTHERS))

_ONE_STAGE = When(_STAGES, lambda provider: provider.pipeline_model_parallel_size == 1)
_STAGES_ARE_ALIKE = When(
    "",  # then megatron-core finds out while it builds them
    lambda provider: (
        provider.pipeline_model_parallel_layout is None
        and provider.num_layers_in_first_pipeline_stage is None
        and provider.num_layers_in_last_pipeline_stage is None
        and not provider.account_for_embedding_in_pipeline_split
        and not provider.account_for_loss_in_pipeline_split
    ),
)
_ONE_MODULE = When("", lambda provider: not provider.dist_train.use_dist_train)
_DENSE_LAYERS = When("", lambda provider: len(provider.moe_layers) < provider.num_layers)
_EXPERTS = When("", lambda provider: provider.moe_layers)
_CONTEXT = "context_parallel_size transformer_impl"

# For a provider whose fields megatron-core has completed.
RULES: tuple[Rule, ...] = (
    Row("padded_vocab_size", multiple_of(_TENSOR), "should_pad_vocab pads it"),
    *under(_ONE_MODULE, *(Row(width, multiple_of(_TENSOR)) for width in VISION_WIDTHS)),
    Row("ffn_hidden_size", multiple_of(_TENSOR), when=_DENSE_LAYERS),
    Row("moe_ffn_hidden_size", multiple_of("expert_tensor_parallel_size"), when=_EXPERTS),
    _check_expert_ranks,
    Row(_CHUNKS, None, "there are no stages to interleave", _ONE_STAGE, also=(1,)),
    Row(
        "num_layers",
        multiple_of(f"{_STAGES} * {_CHUNKS}"),
        "or uneven stages: set pipeline_model_parallel_layout, num_layers_in_first_pipeline_stage and "
        "num_layers_in_last_pipeline_stage, or account_for_embedding_in_pipeline_split and "
        "account_for_loss_in_pipeline_split",
        _STAGES_ARE_ALIKE,
    ),
    _check_rows,
    Row(
        "cp_comm_type",
        any_of(None, "all_gather"),
        "keys and values are gathered once a layer",
        When(_CONTEXT, lambda provider: provider.context_parallel_size > 1 and provider.transformer_impl == "local"),
    ),
    Row(
        "cp_comm_type",
        any_of(None, "p2p", "all_gather", "a2a"),  # "p2p" is the default; a single padded row is a packed row here
        "packed rows have no other",
        When(_CONTEXT, lambda provider: provider.context_parallel_size > 1 and provider.transformer_impl != "local"),
    ),
    _check_context_kernels,
)


def _stages(provider: VisionLanguageFields) -> tuple[int, int]:
    """Pipeline stages, and chunks of each; 0 if they are not interleaved."""
    return provider.pipeline_model_parallel_size, provider.virtual_pipeline_model_parallel_size or 0


_BETWEEN = f"{_STAGES} {_CHUNKS}"

# Only for a model that is built to be trained: one that is loaded for export or inference may carry settings of
# schedules from the run that saved it. Megatron-Bridge's `comm_overlap` writes `overlap_p2p_comm` and `batch_p2p_comm`
# before it finalises the model. Numbers of microbatches of interleaved stages: `check_microbatches`.
TRAINING: tuple[Rule, ...] = (
    _check_sent_type,
    Row(
        "overlap_p2p_comm",
        False,
        "the schedule has nothing to overlap",
        When(_BETWEEN, lambda provider: _stages(provider)[0] > 1 and not _stages(provider)[1]),
    ),
    # Each of two stages is both the previous and the next of the other. In a batch, a stage would confuse what it
    # receives from the previous with what it receives from the next, and nothing fails: the gradients are wrong. One by
    # one, they would deadlock.
    Row(
        "overlap_p2p_comm",
        True,
        "two interleaved stages would confuse the tensors they send each other; batch_p2p_comm must be False as well",
        When(_BETWEEN, lambda provider: _stages(provider)[0] == 2 and _stages(provider)[1] > 1),
    ),
    Row(
        "batch_p2p_comm",
        False,
        "the schedule supports only one of the two",
        When(f"overlap_p2p_comm {_STAGES}", lambda provider: provider.overlap_p2p_comm and _stages(provider)[0] > 1),
    ),
    _check_groups,
    _check_taps,
    Row("parallel_output", True, LOGITS, When(_TENSOR, lambda provider: provider.tensor_model_parallel_size > 1)),
)
