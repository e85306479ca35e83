"""Settings of separate vision and language ranks (dist-train).

The first ranks are the vision tower's, the others the language model's. Both have their own data-parallel replicas; one
number is a multiple of the other. With more vision replicas, those of a language replica divide its images; with fewer,
each encodes the images of several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3vl_bridge.models.settings.fields import DistTrainConfig as DistTrainConfig  # saved runs name it so
from qwen3vl_bridge.models.settings.fields import VisionLanguageFields
from qwen3vl_bridge.models.settings.parallelism import VISION_WIDTHS
from qwen3vl_bridge.models.settings.rules import Row, Rule, When, at_least, check, multiple_of, under
from qwen3vl_bridge.parallel.encoder_replicas import Replicas

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

# The modules' names in Megatron-Bridge's set-up: of grids, and of payloads.
VISION, LANGUAGE = "vision_module", "language_module"


def replicas_of(provider: VisionLanguageFields) -> Replicas:
    """Replicas of a provider with separate vision ranks."""
    split = provider.dist_train
    return Replicas(
        vision=split.vision_world_size // split.vision_tensor_model_parallel_size,
        language=split.language_world_size // _language_size(provider),
    )


def _language_size(provider: VisionLanguageFields) -> int:
    return provider.tensor_model_parallel_size * provider.pipeline_model_parallel_size * provider.context_parallel_size


def vision_tensor_ranks(provider: VisionLanguageFields) -> int:
    """Ranks that share each layer of the vision tower."""
    split = provider.dist_train
    return split.vision_tensor_model_parallel_size if split.use_dist_train else provider.tensor_model_parallel_size


def trains_vision(provider: VisionLanguageFields) -> bool:
    """Whether some part of the vision tower is trained."""
    return not (provider.freeze_vision_model and provider.freeze_vision_projection)


def check_world(provider: VisionLanguageFields, world: int) -> None:
    """Check that every process is a rank of one of the modules.

    Args:
        provider: finalised or not.
        world: number of processes.

    Raises:
        ValueError: another number of processes, or sizes that are missing or do not divide.
    """
    split = provider.dist_train
    if not split.use_dist_train:
        return
    check(SIZES, provider)
    if split.vision_world_size + split.language_world_size != world:
        raise ValueError(
            f"dist_train.vision_world_size {split.vision_world_size} and language_world_size "
            f"{split.language_world_size} add up to {split.vision_world_size + split.language_world_size}, expected "
            f"{world}, the number of processes: each is either a vision or a language rank"
        )


def _check_replicas(provider: VisionLanguageFields) -> None:
    if not provider.dist_train.use_dist_train:
        return
    replicas, ratio = replicas_of(provider), provider.dist_train.vision_to_llm_dp_ratio
    replicas.check(
        ": dist_train.vision_world_size / vision_tensor_model_parallel_size, and language_world_size / "
        "(tensor * pipeline * context parallel size)"
    )
    if ratio not in (None, replicas.ratio):
        raise ValueError(
            f"dist_train.vision_to_llm_dp_ratio is {ratio}, expected None"
            + (f" or {replicas.ratio}" if replicas.ratio else "")
            + f": there are {replicas.vision} replicas of the tower and {replicas.language} of the language model"
        )


def _check_sent_type(provider: VisionLanguageFields) -> None:
    if provider.dist_train.use_dist_train and provider.pipeline_dtype not in (None, provider.params_dtype):
        raise ValueError(
            f"pipeline_dtype is {provider.pipeline_dtype}, expected params_dtype, {provider.params_dtype}, the dtype "
            "of the tower's output"
        )


# Separate vision ranks, or not.
APART = When("dist_train.use_dist_train", lambda provider: provider.dist_train.use_dist_train)
_TOGETHER = When("dist_train.use_dist_train", lambda provider: not provider.dist_train.use_dist_train)
_EXPERTS_APART = When("", lambda provider: provider.dist_train.use_dist_train and provider.moe_layers)
_VISION, _RANKS = "dist_train.vision_tensor_model_parallel_size", "dist_train.language_world_size"
_TENSOR, _STAGES, _CONTEXT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
_EXPERTS = "expert_tensor_parallel_size * expert_model_parallel_size"

# Number of ranks of each module, for a provider that is finalised or not.
SIZES: tuple[Rule, ...] = (
    *under(
        APART,
        *(Row(name, at_least(1)) for name in ("dist_train.vision_world_size", _RANKS, _VISION)),
        Row("dist_train.vision_pipeline_model_parallel_size", 1, "the tower is one stage"),
        Row("dist_train.vision_context_parallel_size", 1, "data-parallel ranks of the tower divide the images"),
        Row("dist_train.vision_expert_tensor_parallel_size", 1, "the tower has no experts"),
        Row("dist_train.vision_expert_model_parallel_size", 1, "the tower has no experts"),
        *(Row(name, multiple_of(_VISION)) for name in (*VISION_WIDTHS, "dist_train.vision_world_size")),
        Row(_RANKS, multiple_of(f"{_TENSOR} * {_STAGES} * {_CONTEXT}")),
    ),
    Row(_RANKS, multiple_of(f"{_EXPERTS} * {_STAGES}"), when=_EXPERTS_APART),
)

# For a provider whose fields megatron-core has completed, before any process group is created.
RULES: tuple[Rule, ...] = (
    *under(
        _TOGETHER,
        *(
            Row(f"dist_train.{name}", default, "it would be ignored", also=(None,))  # Megatron-Bridge's default
            for name, default in vars(DistTrainConfig()).items()
            if name != "use_dist_train"
        ),
        *(Row(name, True, "every rank has both modules") for name in ("add_encoder", "add_decoder")),
    ),
    *SIZES,
    _check_replicas,
    *under(
        APART,
        Row(_CONTEXT, 1, "megatron-core's communicator between modules does not support context parallelism"),
        Row(f"virtual_{_STAGES}", None, "the schedule of two modules is not interleaved"),
        Row("variable_seq_lengths", True, "the size of what the modules send each other depends on a row's images"),
        Row("fp16", False, "each module would scale its loss and skip steps independently"),
        Row(
            "calculate_per_token_loss",
            True,
            "otherwise each module divides gradients by the number of its own data-parallel ranks",
        ),
        Row("overlap_p2p_comm", False, "the schedule of two modules is not interleaved"),
        Row("fp32_residual_connection", False, "stages would send another dtype than the modules"),
    ),
    _check_sent_type,
)


def complete_dist_train(provider: VisionLanguageFields) -> None:
    """Set the dtype of payloads between modules; megatron-core sets it only under pipeline parallelism."""
    if provider.dist_train.use_dist_train and provider.pipeline_dtype is None:
        provider.pipeline_dtype = provider.params_dtype


# A group of megatron-core, and the group that it equals if weights are not gathered again for the backward pass.
_SAME = {"tp_ep_pp_with_egtp_remat": "tp_ep_pp", "dp_cp_gtp_remat": "dp_cp", "expt_dp_gtp_remat": "expt_dp"}


def complete_groups(provider: VisionLanguageFields, groups: ProcessGroupCollection | None, *, training: bool) -> None:
    """Set the groups that are None in Megatron-Bridge's collection for a module.

    megatron-core interprets None as all ranks for experts' gradient norms: language ranks would wait for a sum that
    vision ranks take for another one. For experts' metrics it interprets None as its global groups, which are not
    created here.

    A checkpoint of modules that is opened for inspection, without groups, is treated as one of a complete model.

    Args:
        provider: changed in place in that case.
        groups: of this rank's module.
        training: whether the model is to be trained.

    Raises:
        ValueError: separate vision ranks, and no groups.
    """
    if groups is None and not training:
        provider.dist_train, provider.add_encoder, provider.add_decoder = DistTrainConfig(), True, True
    if not provider.dist_train.use_dist_train:
        return
    if groups is None:
        raise ValueError("pg_collection is None with dist_train.use_dist_train, expected the groups of this module")
    for name, same in _SAME.items():
        if getattr(groups, name, None) is None:
            setattr(groups, name, getattr(groups, same))
