"""The fields of a provider for the model, its kernels and its parallelism, and functions that adjust these fields."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.config.divisibility import Replicas
from qwen3vl_bridge.config.hf_config import ROPE_FIELDS, rope_parameters_of
from qwen3vl_bridge.lazy import is_installed
from qwen3vl_bridge.upstream.weight_gradients import output_layer_fuses

import torch
import torch.nn.functional as F
from megatron.bridge.models.gpt_provider import GPTModelProvider, modelopt_transformer_layer_spec
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor, nn
from transformers.activations import ACT2FN

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

logger = logging.getLogger(__name__)

Activation = Callable[[Tensor], Tensor]


def has_transformer_engine() -> bool:
    """Return True if Transformer Engine is installed and a GPU is available."""
    return is_installed("transformer_engine") and torch.cuda.is_available()


def attribute_alias(path: str) -> property:
    """Return a property that is an alias of another attribute of the object, such as "config.image_token_id".

    With aliases, our classes have attributes with the same names as Megatron-Bridge's own classes.
    """
    owner, _, name = path.rpartition(".")
    find_owner = attrgetter(owner) if owner else lambda instance: instance
    return property(attrgetter(path), lambda instance, value: setattr(find_owner(instance), name, value))


def default_transformer_impl() -> str:
    """Return "transformer_engine" if it can run, else "local": modules of torch and megatron-core."""
    return "transformer_engine" if has_transformer_engine() else "local"


def can_fuse_weight_gradients() -> bool:
    """Return True if every linear layer can accumulate its weight gradient in a fused kernel.

    Transformer Engine's layers can. The output layer comes from megatron-core in both layer specs, and can do so only
    with Apex's extension. Without the extension, it raises an error if fusion is requested.
    """
    return output_layer_fuses() and torch.cuda.is_available()


def deepstack_layers_of(vision_config: Any) -> list[int]:
    """Return the indices of the vision layers that have a DeepStack merger; an empty list without DeepStack."""
    return list(getattr(vision_config, "deepstack_visual_indexes", None) or ())


@dataclass
class VisionLanguageFields(GPTModelProvider):
    """Fields of a vision tower and a language model. The inherited fields describe the language model.

    Attributes:
        vision_config: transformers' configuration of the vision tower.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id, bos_token_id, eos_token_id: id of
            the token in the vocabulary.
        pad_token_id: token id of padding, used only if a caller passes rows without an attention mask: then tokens with
            this id at the end of a row are padding. None: no token is padding.
        mrope_section: number of rotary frequencies for the temporal, height and width axis.
        rope_parameters: parameters of a scaled rotary embedding (such as YaRN) in transformers' format, or None.
            `finalize()` adds `rotary_base` and other fields to them. With `position_embedding_type="yarn"`, they are
            set from Megatron-Bridge's `yarn_*` fields.
        freeze_language_model, freeze_vision_model, freeze_vision_projection: do not train this component. The vision
            projection consists of the patch mergers.
        vision_recompute_granularity, vision_recompute_modules, vision_recompute_method, vision_recompute_num_layers:
            activation recomputation in the vision tower; the fields without `vision_` apply to the text model.
        apply_rotary_pos_emb_in_fp32: rotate queries and keys of the text model in float32. The vision tower and
            Transformer Engine's kernel (`apply_rope_fusion`) always use float32.
        calculate_per_token_loss: sum losses over tokens and divide once by the number of tokens in the global batch, so
            that packing does not change the loss. This package's recipes do so. False: all microbatches have equal
            weight. None: as in Megatron-Bridge, True only under context parallelism or with `dist_train`.
        loss_chunk_tokens: if a microbatch has more tokens than this on a context-parallel rank, compute its loss in
            chunks of this many tokens, and recompute the logits in the backward pass
            (`models/common/loss.py`). 0: never.
        vision_dp_when_cp: accepted for callers of Megatron-Bridge's own model, and ignored: context-parallel ranks
            always divide the images.
        use_hf_vision_model, vision_cuda_graph_impl, vision_cuda_graph_scope, max_vision_cuda_graph_seq_length: settings
            of Megatron-Bridge's own model. Only the default is supported.
        dist_train: separate ranks for the vision tower and the language model. The first `vision_world_size` ranks run
            the tower, the next `language_world_size` ranks the language model. The tensor-parallel size of the tower is
            `vision_tensor_model_parallel_size`.
        add_encoder, add_decoder: whether this rank has the vision tower and the language model. Megatron-Bridge's
            set-up sets them.
    """

    vision_config: Any = None

    image_token_id: int = -1
    video_token_id: int = -1
    vision_start_token_id: int = -1
    vision_end_token_id: int = -1
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    normalization: str = "RMSNorm"
    layernorm_epsilon: float = 1e-6
    gated_linear_unit: bool = True
    activation_func: object = F.silu
    add_bias_linear: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    position_embedding_type: str = "mrope"
    mrope_section: list[int] = field(default_factory=list)
    rope_parameters: dict[str, Any] | None = None
    scatter_embedding_sequence_parallel: bool = False
    share_embeddings_and_output_weights: bool = False

    transformer_impl: str = field(default_factory=default_transformer_impl)
    gradient_accumulation_fusion: bool = field(default_factory=can_fuse_weight_gradients)
    bias_activation_fusion: bool = True
    apply_rope_fusion: bool = field(default_factory=has_transformer_engine)
    cross_entropy_loss_fusion: bool = True  # finalize() turns it off for float32 logits
    apply_rotary_pos_emb_in_fp32: bool = False
    # With its own default, megatron-core rejects rows of different lengths in a pipeline, even without experts.
    moe_token_dispatcher_type: str = "alltoall"
    calculate_per_token_loss: bool | None = None
    # With Qwen3-VL's vocabulary the logits of 2,048 tokens and their gradient take 1.2 GiB. Rows up to this length cost
    # nothing more; longer rows compute the output layer twice, 2 % of a step of 8B (docs/performance.md).
    loss_chunk_tokens: int = 2048

    freeze_language_model: bool = False
    freeze_vision_model: bool = False
    freeze_vision_projection: bool = False

    vision_recompute_granularity: str | None = None
    vision_recompute_modules: list[str] | None = None
    vision_recompute_method: str | None = None
    vision_recompute_num_layers: int | None = None

    use_hf_vision_model: bool = False
    vision_dp_when_cp: bool = False
    vision_cuda_graph_impl: str = "none"
    vision_cuda_graph_scope: list[str] = field(default_factory=list)
    max_vision_cuda_graph_seq_length: int | None = None

    dist_train: DistTrainConfig = field(default_factory=DistTrainConfig)
    add_encoder: bool = True
    add_decoder: bool = True

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Return the indices of the vision layers that have a DeepStack merger."""
        return tuple(deepstack_layers_of(self.vision_config))

    @property
    def rope_fields(self) -> dict[str, Any]:
        """Return the values of the rotary fields: name in transformers' `rope_parameters` -> value.

        A `partial_rotary_factor` of 1 is omitted.
        """
        fields = {name: getattr(self, field) for field, name in ROPE_FIELDS.items()}
        if fields["partial_rotary_factor"] == 1.0:
            del fields["partial_rotary_factor"]  # no released configuration states it
        return fields | {"mrope_section": list(self.mrope_section)}

    @property
    def trains_mtp(self) -> bool:
        """Return True if the model has multi-token prediction and trains it."""
        return bool(self.mtp_num_layers and self.mtp_loss_scaling_factor)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Return the indices of the text layers with experts."""
        return ()


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU. Source: transformers, GELUTanh."""
    return F.gelu(x, approximate="tanh")


# Named functions, because the activation of the text model is a field that `run_config.yaml` saves.
_TEXT_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}


def text_activation(name: str) -> Activation:
    """Return the activation of the text model's gated MLPs, including experts.

    Args:
        name: name of the activation in a Hugging Face configuration.

    Raises:
        ValueError: the activation is not supported.
    """
    if name not in _TEXT_ACTIVATIONS:
        raise ValueError(f"the text model's activation is {name!r}, expected one of {', '.join(_TEXT_ACTIVATIONS)}")
    return _TEXT_ACTIVATIONS[name]


def activation_name(function: Activation) -> str:
    """Return the Hugging Face name of a text model's activation; raises ValueError for an unknown function."""
    names = [name for name, known in _TEXT_ACTIVATIONS.items() if function is known]
    if not names:
        raise ValueError(
            f"activation_func is {function!r}, expected the function for one of {', '.join(_TEXT_ACTIVATIONS)}"
        )
    return names[0]


def vision_activation(name: str) -> Activation:
    """Return the activation of the vision tower's MLPs. Patch mergers always use the exact GELU.

    Args:
        name: name of the activation in transformers.

    Raises:
        ValueError: the name is unknown, or the activation has parameters, which the weight table does not list.
    """
    if name not in ACT2FN:
        raise ValueError(f"vision_config.hidden_act is {name!r}, expected one of {', '.join(ACT2FN)}")
    activation = ACT2FN[name]
    if not isinstance(activation, nn.Module):
        return activation
    if any(True for _ in activation.parameters()):
        raise ValueError(f"vision_config.hidden_act is {name!r}, which has parameters: use one without parameters")
    return activation.forward  # not a module, which an MLP would register


def uses_unfused_attention(provider: VisionLanguageFields) -> bool:
    """Return True if Transformer Engine computes attention in float32.

    It then has no fused kernel, and stores all attention scores.
    """
    float32 = provider.params_dtype == torch.float32 and not provider.enable_autocast
    return float32 and provider.transformer_impl != "local"


def token_multiple(provider: VisionLanguageFields) -> int:
    """Return the number that must divide the tokens of each rank for FP8 or FP4 GEMMs; 1 in other precisions."""
    if provider.fp8:
        return get_fp8_align_size(provider.fp8_recipe)
    return get_fp4_align_size(provider.fp4_recipe) if provider.fp4 else 1


def sequence_parallel_size(provider: VisionLanguageFields) -> int:
    """Return the number of ranks over which hidden states are sharded; 1 without sequence parallelism."""
    return provider.tensor_model_parallel_size if provider.sequence_parallel else 1


def _turn_off(settings: Any, name: str, why: str, *, level: int = logging.INFO) -> None:
    logger.log(level, "%s is set to False: %s", name, why)
    setattr(settings, name, False)


def complete_dist_train(provider: VisionLanguageFields) -> None:
    """Replace None by 1 in the parallel sizes of `dist_train`, because Megatron-Bridge divides by them.

    Without `dist_train.use_dist_train`, do nothing.
    """
    dist_train = provider.dist_train
    for name, value in vars(dist_train).items():
        if dist_train.use_dist_train and value is None and name.endswith("parallel_size"):
            setattr(dist_train, name, 1)


# Fields of YaRN: transformers' name -> Megatron-Bridge's name.
YARN_FIELDS = {
    "factor": "yarn_rotary_scaling_factor",
    "truncate": "yarn_correction_range_round_to_int",
    **{
        name: f"yarn_{name}"
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    },
}


def complete_rope(provider: VisionLanguageFields) -> None:
    """Add the values of the provider's rotary fields, and of Megatron-Bridge's YaRN fields, to `rope_parameters`.

    Afterwards `rope_parameters` is None if the rotary embedding is not scaled. YaRN fields are read only with
    `position_embedding_type="yarn"`, which becomes "mrope".

    Raises:
        ValueError: `rope_parameters` is malformed or contradicts another field.
    """
    if provider.position_embedding_type == "yarn":
        values = {name: getattr(provider, field) for name, field in YARN_FIELDS.items()}
        if not values["mscale_all_dim"] and values["mscale"] in (None, 1.0):  # the default value is 1
            values["mscale"] = values["mscale_all_dim"] = None
        if bool(values["mscale"]) != bool(values["mscale_all_dim"]):
            raise ValueError(
                f"yarn_mscale is {values['mscale']} and yarn_mscale_all_dim {values['mscale_all_dim']}, expected both "
                "above 0, or neither"
            )
        given = {name: value for name, value in values.items() if value is not None}
        provider.rope_parameters = {"rope_type": "yarn"} | given | (provider.rope_parameters or {})
        provider.position_embedding_type = "mrope"
        for name in YARN_FIELDS.values():
            setattr(provider, name, None)
    if provider.rope_parameters is None:
        return
    other = provider.rope_fields
    given = {name: value for name, value in provider.rope_parameters.items() if value is not None}
    rope = rope_parameters_of({"rope_parameters": other | given}, dict.fromkeys(other))
    for name, value in other.items():
        if rope[name] != value:
            raise ValueError(
                f"rope_parameters has {name} {rope[name]}, but another field of the provider sets {value}: remove "
                f"{name} from rope_parameters, or set both to the same value"
            )
    provider.rope_parameters = None if rope["rope_type"] == "default" else rope


def complete_before_finalize(provider: VisionLanguageFields) -> None:
    """Adjust fields before megatron-core's `finalize`, and log the changes.

    Replace the names of the attention backend and the activation by the objects that megatron-core expects. Turn off
    fused kernels that are not available, and turn on settings that experts or context parallelism need.

    Raises:
        ValueError: the attention backend or the activation is unknown.
    """
    if provider.mtp_num_layers == 0:
        provider.mtp_num_layers = None  # megatron-core uses None for a model without such layers
    if provider.restore_modelopt_state:  # ModelOpt reads weights before they are loaded, and rejects NaN
        provider.perform_initialization = True
    if provider.transformer_layer_spec is modelopt_transformer_layer_spec:
        logger.info(
            "transformer_layer_spec is modelopt_transformer_layer_spec, which has no effect: ModelOpt quantizes the "
            "layers that transformer_impl %r selects",
            provider.transformer_impl,
        )
    complete_dist_train(provider)
    complete_rope(provider)
    local = provider.transformer_impl == "local"
    if isinstance(provider.attention_backend, str):
        if provider.attention_backend not in AttnBackend.__members__:
            known = ", ".join(AttnBackend.__members__)
            raise ValueError(f"attention_backend is {provider.attention_backend!r}, expected one of {known}")
        provider.attention_backend = AttnBackend[provider.attention_backend]
    if local and provider.attention_backend not in (AttnBackend.auto, AttnBackend.local):
        logger.info(
            "attention_backend %s selects one of Transformer Engine's kernels and has no effect with transformer_impl "
            "'local', where torch chooses",
            provider.attention_backend.name,
        )
    if provider.apply_rope_fusion and (local or not has_transformer_engine()):
        why = "the kernel is Transformer Engine's, and needs it, a GPU and transformer_impl 'transformer_engine'"
        _turn_off(provider, "apply_rope_fusion", why)
    if isinstance(provider.activation_func, str):
        provider.activation_func = text_activation(provider.activation_func.removeprefix("torch.nn.functional."))
    if provider.bias_activation_fusion and provider.activation_func is not F.silu:
        why = f"megatron-core fuses only SiLU, and would compute that in place of {provider.activation_func}"
        _turn_off(provider, "bias_activation_fusion", why)
    if provider.gradient_accumulation_fusion and not can_fuse_weight_gradients():
        why = "megatron-core's output layer needs Apex's fused_weight_gradient_mlp_cuda and a GPU for it"
        _turn_off(provider, "gradient_accumulation_fusion", why, level=logging.WARNING)
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
            "rows are divided. Return two values, the rank's share of the mean and the values to report, as this "
            "package's forward step does; or set calculate_per_token_loss=True",
            context,
        )


def complete_after_finalize(provider: VisionLanguageFields) -> None:
    """Adjust fields that depend on `params_dtype`, which megatron-core's `finalize` has set, and log the changes."""
    for precision in ("fp8", "fp4"):
        if getattr(provider, precision):
            logger.info(
                "%s applies to the text model's layers; the vision tower computes in the dtype of its parameters",
                precision,
            )
    if uses_unfused_attention(provider):
        logger.warning(
            "params_dtype is torch.float32: Transformer Engine's attention then stores all attention scores, which "
            "needs much memory. transformer_impl='local' does not store them"
        )
    native = provider.cross_entropy_loss_fusion and provider.cross_entropy_fusion_impl == "native"
    if native and provider.params_dtype == torch.float32:
        why = "for float32 logits the unfused loss needs less memory, because it overwrites them"
        _turn_off(provider, "cross_entropy_loss_fusion", why)
    if provider.dist_train.use_dist_train and provider.pipeline_dtype is None:
        provider.pipeline_dtype = provider.params_dtype  # megatron-core sets it only under pipeline parallelism


def warn_of_unfused_attention(provider: VisionLanguageFields) -> None:
    """Warn if Transformer Engine has no fused attention kernel to train on packed rows with this GPU and head size.

    Source: what Transformer Engine 2.16.1 with cuDNN 9.20 returns from `get_attention_backend`. flash-attn has a kernel
    for all GPUs and head sizes.
    """
    if provider.transformer_impl == "local" or not torch.cuda.is_available():
        return
    (major, minor), width = torch.cuda.get_device_capability(), provider.kv_channels
    has_kernel = major == 9 or (major > 9 and width <= 128)  # Hopper, Blackwell
    if not has_kernel and not is_installed("flash_attn"):
        logger.warning(
            "cuDNN has no kernel to train on packed rows with head size %d on compute capability %d.%d, so that "
            "Transformer Engine would store all attention scores: install flash-attn",
            width,
            major,
            minor,
        )


def complete_ddp(provider: VisionLanguageFields, ddp: DistributedDataParallelConfig | None, *, fsdp: bool) -> None:
    """Turn off settings of DDP, Megatron-FSDP and the model that would give wrong gradients, and log the changes."""
    # Gradients are summed if losses are divided by tokens. Megatron-Bridge's recipes average them.
    if ddp is not None and ddp.average_in_collective and provider.calculate_per_token_loss:
        why = (
            "with calculate_per_token_loss, gradients are summed over ranks and divided by the tokens of the global "
            "batch"
        )
        _turn_off(ddp, "average_in_collective", why)
    # Under Megatron-FSDP a fused weight gradient overwrites the weight's `main_grad`. The output layer would learn only
    # from the last chunk of a loss, and a tied embedding only from one of its two uses.
    uses = {
        "loss_chunk_tokens": provider.loss_chunk_tokens,
        "mtp_loss_scaling_factor": provider.trains_mtp,
        "share_embeddings_and_output_weights": provider.share_embeddings_and_output_weights,
    }
    names = " and ".join(name for name, used in uses.items() if used)
    if fsdp and provider.gradient_accumulation_fusion and names:
        why = (
            f"with {names} the output layer's weight gets several gradients in a microbatch, and Megatron-FSDP would "
            "keep only the last"
        )
        _turn_off(provider, "gradient_accumulation_fusion", why, level=logging.WARNING)


def dist_train_replicas(provider: VisionLanguageFields) -> Replicas:
    """Return the numbers of data-parallel replicas of the vision tower and the language model on separate ranks."""
    dist_train = provider.dist_train
    language_size = (
        provider.tensor_model_parallel_size * provider.pipeline_model_parallel_size * provider.context_parallel_size
    )
    return Replicas(
        vision=dist_train.vision_world_size // (dist_train.vision_tensor_model_parallel_size or 1),
        language=dist_train.language_world_size // language_size,
    )


def vision_tp_size(provider: VisionLanguageFields) -> int:
    """Return the tensor-parallel size of the vision tower."""
    dist_train = provider.dist_train
    size = dist_train.vision_tensor_model_parallel_size or 1
    return size if dist_train.use_dist_train else provider.tensor_model_parallel_size


def trains_vision(provider: VisionLanguageFields) -> bool:
    """Return True if the vision model or the vision projection is trained."""
    return not (provider.freeze_vision_model and provider.freeze_vision_projection)


# megatron-core's groups for gathering weights again in the backward pass -> the group that replaces each. This model
# never gathers weights again.
_SAME_GROUPS = {"tp_ep_pp_with_egtp_remat": "tp_ep_pp", "dp_cp_gtp_remat": "dp_cp", "expt_dp_gtp_remat": "expt_dp"}


def complete_groups(provider: VisionLanguageFields, groups: ProcessGroupCollection | None, *, training: bool) -> None:
    """Set the process groups that Megatron-Bridge leaves None for a module on separate ranks (`dist_train`).

    Without `training` and `groups`, turn off `dist_train` instead, so that the complete model is built.

    Raises:
        ValueError: a model with separate vision ranks is trained, and `groups` is None.
    """
    # Without groups and training, a checkpoint of separate modules is inspected: build a complete model.
    if groups is None and not training:
        provider.dist_train, provider.add_encoder, provider.add_decoder = DistTrainConfig(), True, True
    if not provider.dist_train.use_dist_train:
        return
    if groups is None:
        raise ValueError("pg_collection is None with dist_train.use_dist_train, expected the groups of this module")
    # For the gradient norms of experts, megatron-core takes None for all ranks: language ranks would wait for a sum
    # that vision ranks mistake for another. For metrics of experts, it uses its global groups, which do not exist here.
    for name, same in _SAME_GROUPS.items():
        if getattr(groups, name, None) is None:
            setattr(groups, name, getattr(groups, same))
