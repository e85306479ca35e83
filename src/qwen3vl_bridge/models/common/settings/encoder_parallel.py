"""Vision and language on ranks of their own: the settings.

What lives here: checks of the fields of `provider.dist_train`. What may not: the fields (`fields.py`), who encodes for
whom (`parallel/encoder_replicas.py`), process groups (Megatron-Bridge's set-up makes them from these fields), tensors,
modules.

The first ranks are the vision tower's, the others the language model's. Both have data-parallel replicas of their own;
one number is a multiple of the other. With more of the tower's, those of a language replica share its pictures; with
fewer, each encodes the pictures of several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qwen3vl_bridge.models.common.settings.fields import DistTrainConfig as DistTrainConfig  # saved runs name it so
from qwen3vl_bridge.models.common.settings.fields import VisionLanguageFields
from qwen3vl_bridge.models.common.settings.parallelism import vision_widths
from qwen3vl_bridge.parallel.encoder_replicas import Replicas

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

# The modules' names in Megatron-Bridge's set-up: of grids, and of what they send each other.
VISION, LANGUAGE = "vision_module", "language_module"
SIZES = ("vision_world_size", "language_world_size", "vision_tensor_model_parallel_size")


def replicas_of(provider: VisionLanguageFields) -> Replicas:
    """Those of a provider that trains this way."""
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


def check_dist_train(provider: VisionLanguageFields) -> None:
    """Check a provider whose fields megatron-core has completed, before any process group is made.

    Raises:
        ValueError: sizes that are missing or don't divide, or settings that would be ignored or fail in the first step.
    """
    split = provider.dist_train
    if not split.use_dist_train:
        _check_unused(provider)
        return
    _check_sizes(provider)
    _check_replicas(provider)
    _check_schedule(provider)


def expect(settings: Mapping[str, tuple[object, object, str]], where: str = "") -> None:
    """Refuse settings that vision and language on ranks of their own cannot have.

    Args:
        settings: by name, what was found, what is expected, and why.
        where: it is expected, for the message, as " in ...".

    Raises:
        ValueError: one has another value.
    """
    for name, (found, expected, why) in settings.items():
        if found != expected:
            raise ValueError(f"{name} is {found!r} with dist_train.use_dist_train, expected {expected!r}{where}: {why}")


def check_world(provider: VisionLanguageFields, world: int) -> None:
    """Check that every process is a rank of one of the modules.

    Args:
        provider: finalised or not.
        world: how many processes there are.

    Raises:
        ValueError: there are more or fewer, or sizes are missing or don't divide.
    """
    split = provider.dist_train
    if not split.use_dist_train:
        return
    _check_sizes(provider)
    if split.vision_world_size + split.language_world_size != world:
        raise ValueError(
            f"dist_train.vision_world_size {split.vision_world_size} and language_world_size "
            f"{split.language_world_size} add up to {split.vision_world_size + split.language_world_size}, expected "
            f"{world}, the processes there are: each is a rank of one of the two"
        )


def _check_unused(provider: VisionLanguageFields) -> None:
    usual, split = DistTrainConfig(), provider.dist_train
    # Megatron-Bridge's own class has None for what is not set.
    found = [f"dist_train.{name}" for name, value in vars(usual).items() if getattr(split, name) not in (value, None)]
    found += [name for name in ("add_encoder", "add_decoder") if not getattr(provider, name)]
    if found:
        raise ValueError(f"{', '.join(found)} set, expected dist_train.use_dist_train=True, or they would be ignored")


def _check_sizes(provider: VisionLanguageFields) -> None:
    split = provider.dist_train
    for name in SIZES:
        if (found := getattr(split, name)) is None or found < 1:
            raise ValueError(f"dist_train.{name} is {found}, expected 1 or more")
    for name, why in {
        "vision_pipeline_model_parallel_size": "the tower is one stage",
        "vision_context_parallel_size": "ranks share pictures as data-parallel ones",
        "vision_expert_tensor_parallel_size": "the tower has no experts",
        "vision_expert_model_parallel_size": "the tower has no experts",
    }.items():
        if getattr(split, name) != 1:
            raise ValueError(f"dist_train.{name} is {getattr(split, name)}, expected 1: {why}")
    tensor, ranks = split.vision_tensor_model_parallel_size, {"dist_train.vision_world_size": split.vision_world_size}
    for name, width in (vision_widths(provider) | ranks).items():
        if width % tensor:
            raise ValueError(
                f"{name} is {width}, expected a multiple of dist_train.vision_tensor_model_parallel_size, {tensor}"
            )
    sizes = "tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size"
    language, each = split.language_world_size, _language_size(provider)
    if language % each:
        raise ValueError(f"dist_train.language_world_size is {language}, expected a multiple of {each}, {sizes}")
    experts = provider.expert_tensor_parallel_size or provider.tensor_model_parallel_size
    experts *= provider.expert_model_parallel_size * provider.pipeline_model_parallel_size
    if provider.moe_layers and language % experts:
        raise ValueError(
            f"dist_train.language_world_size is {language}, expected a multiple of {experts}, "
            "expert_tensor_parallel_size * expert_model_parallel_size * pipeline_model_parallel_size"
        )


def _check_replicas(provider: VisionLanguageFields) -> None:
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


def _check_schedule(provider: VisionLanguageFields) -> None:
    wrong = {
        "context_parallel_size": (
            provider.context_parallel_size,
            1,
            "megatron-core's communicator between modules does not know context parallelism",
        ),
        "virtual_pipeline_model_parallel_size": (
            provider.virtual_pipeline_model_parallel_size,
            None,
            "the schedule of two modules is not interleaved",
        ),
        "variable_seq_lengths": (
            provider.variable_seq_lengths,
            True,
            "what the modules send each other grows with the pictures of a row",
        ),
        "fp16": (provider.fp16, False, "each module would scale its loss, and skip steps, by itself"),
        "calculate_per_token_loss": (
            provider.calculate_per_token_loss,
            True,
            "megatron-core would divide each module's gradients by its own data-parallel ranks",
        ),
        "overlap_p2p_comm": (provider.overlap_p2p_comm, False, "the schedule of two modules is not interleaved"),
        "fp32_residual_connection": (
            provider.fp32_residual_connection,
            False,
            "stages would send another type than the modules",
        ),
    }
    expect(wrong)
    if provider.pipeline_dtype not in (None, provider.params_dtype):
        raise ValueError(
            f"pipeline_dtype is {provider.pipeline_dtype}, expected params_dtype, {provider.params_dtype}, in which "
            "the tower has its output"
        )


def complete_dist_train(provider: VisionLanguageFields) -> None:
    """Say what the modules send each other in; megatron-core asks for it under pipeline parallelism alone."""
    if provider.dist_train.use_dist_train and provider.pipeline_dtype is None:
        provider.pipeline_dtype = provider.params_dtype


# A group of megatron-core's, and the one it is the same as where no weights are gathered again for the backward pass.
_SAME = {"tp_ep_pp_with_egtp_remat": "tp_ep_pp", "dp_cp_gtp_remat": "dp_cp", "expt_dp_gtp_remat": "expt_dp"}


def complete_groups(provider: VisionLanguageFields, groups: ProcessGroupCollection | None, *, training: bool) -> None:
    """Give a module the groups that Megatron-Bridge's collection of them has None for.

    megatron-core takes None for all ranks, of experts' gradient norms: language ranks would wait for a sum that vision
    ranks take for another one. Of experts' figures it takes None for groups of its own, which are not made here.

    A checkpoint of modules that is opened to look into it, without groups, is one of a whole model.

    Args:
        provider: changed in place in that case.
        groups: of this rank's module.
        training: whether the model is to be trained.

    Raises:
        ValueError: modules on ranks of their own, and no groups.
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
