"""The settings of a provider: fields that define a model, how it is computed and split, and how they are completed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.models.divisibility import Replicas
from qwen3vl_bridge.models.hf_config import rope_parameters_of

import torch
import torch.nn.functional as F
from megatron.bridge.models.gpt_provider import GPTModelProvider, modelopt_transformer_layer_spec
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor, nn
from transformers.activations import ACT2FN

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

logger = logging.getLogger(__name__)

Activation = Callable[[Tensor], Tensor]


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed and there is a GPU for it."""
    return importlib.util.find_spec("transformer_engine") is not None and torch.cuda.is_available()


def default_transformer_impl() -> str:
    """Transformer Engine if it can run, else modules of torch and megatron-core."""
    return "transformer_engine" if has_transformer_engine() else "local"


def can_fuse_weight_gradients() -> bool:
    """Whether every linear layer can accumulate its weight gradient in a fused kernel.

    Transformer Engine's can. The output layer is megatron-core's with either layer spec; it needs Apex's extension, and
    raises if fusion is requested without it.
    """
    return layers._grad_accum_fusion_available and torch.cuda.is_available()


def deepstack_layers_of(vision_config: Any) -> list[int]:
    """Layers of a tower that have a DeepStack merger; none if its family has no DeepStack."""
    return list(getattr(vision_config, "deepstack_visual_indexes", None) or ())


@dataclass
class VisionLanguageFields(GPTModelProvider):
    """Fields of a vision tower and a language model. The inherited ones describe the language model.

    Attributes:
        vision_config: transformers' configuration of the vision tower.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id, bos_token_id, eos_token_id: ids.
        pad_token_id: if a caller's rows come without any mask, a sequence of this id at a row's end is padding. None:
            every token is real.
        mrope_section: rotary frequencies of the temporal, height and width axis.
        rope_parameters: a scaled rotary embedding (such as YaRN) in transformers' format, or None; `finalize()` adds
            what other fields say. Or `position_embedding_type="yarn"` with Megatron-Bridge's `yarn_*`.
        freeze_language_model, freeze_vision_model, freeze_vision_projection: parts that are not trained. The vision
            projection is the patch mergers.
        vision_recompute_granularity, vision_recompute_modules, vision_recompute_method, vision_recompute_num_layers:
            activation recomputation of the vision tower, like the fields without `vision_` for the text model.
        apply_rotary_pos_emb_in_fp32: rotate queries and keys of the text model in float32; in the tower this is always
            done, and by Transformer Engine's kernel in both (`apply_rope_fusion`).
        calculate_per_token_loss: whether losses are summed over tokens and divided once by the tokens of the global
            batch, independent of packing, as in this package's recipes. False: all microbatches have equal weight.
            None: as in Megatron-Bridge, True only under context parallelism (and with `dist_train`).
        loss_chunk_tokens: if a microbatch has more tokens than this on a context-parallel rank, its loss is computed in
            chunks of this many tokens, whose logits are recomputed in the backward pass
            (`models/chunked_loss.py`); 0: never.
        vision_dp_when_cp: Megatron-Bridge's choice whether context-parallel ranks divide the images; here they
            always do.
        use_hf_vision_model, vision_cuda_graph_impl, vision_cuda_graph_scope, max_vision_cuda_graph_seq_length: settings
            of Megatron-Bridge's own model that allow only one value here.
        dist_train: separate ranks for the vision tower (`vision_world_size`, the first ones, of which
            `vision_tensor_model_parallel_size` share a layer) and the language model (`language_world_size`).
        add_encoder, add_decoder: which of the two this rank has, set by Megatron-Bridge's set-up.
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
    cross_entropy_loss_fusion: bool = True  # except of float32 logits: finalize() reports that
    apply_rotary_pos_emb_in_fp32: bool = False
    # megatron-core refuses rows of several lengths between pipeline stages with its own default, experts or not.
    moe_token_dispatcher_type: str = "alltoall"
    calculate_per_token_loss: bool | None = None
    # With Qwen3-VL's vocabulary 2,048 tokens' logits and their gradient take 1.2 GiB; rows up to there pay nothing.
    # Longer ones pay a product of the output layer more, 2 % of an 8B's step (docs/speed.md).
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
        """See `deepstack_layers_of`."""
        return tuple(deepstack_layers_of(self.vision_config))

    @property
    def trains_mtp(self) -> bool:
        """Whether multi-token prediction is trained, in families that have it."""
        return bool(self.mtp_num_layers and self.mtp_loss_scaling_factor)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return ()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation. Source: transformers, GELUTanh."""
    return F.gelu(x, approximate="tanh")


# Functions with a name, for `run_config.yaml`, because the text model's is a field of the provider.
_TEXT_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}


def text_activation(name: str) -> Activation:
    """Activation of the text model's gated MLPs, including experts, by its name in a Hugging Face configuration; raises
    ValueError for a name that is not supported.
    """
    if name not in _TEXT_ACTIVATIONS:
        raise ValueError(f"the text model's activation is {name!r}, expected one of {', '.join(_TEXT_ACTIVATIONS)}")
    return _TEXT_ACTIVATIONS[name]


def name_of_activation(function: Activation) -> str:
    """The name of a text model's activation; raises ValueError for a function that has none in configurations."""
    names = [name for name, known in _TEXT_ACTIVATIONS.items() if function is known]
    if not names:
        raise ValueError(f"activation_func is {function!r}, expected that of one of {', '.join(_TEXT_ACTIVATIONS)}")
    return names[0]


def vision_activation(name: str) -> Activation:
    """Activation of the vision tower's MLPs: any of transformers' without weights, which are not in the weight
    table; raises ValueError for others. Mergers use the exact GELU.
    """
    if name not in ACT2FN:
        raise ValueError(f"vision_config.hidden_act is {name!r}, expected one of {', '.join(ACT2FN)}")
    made = ACT2FN[name]
    if not isinstance(made, nn.Module):
        return made
    if any(True for _ in made.parameters()):
        raise ValueError(f"vision_config.hidden_act is {name!r}, which has parameters: expected one without")
    return made.forward  # not a module, which an MLP would register


def attends_without_kernel(provider: VisionLanguageFields) -> bool:
    """Whether Transformer Engine has only its unfused attention, which keeps all scores: in float32."""
    float32 = provider.params_dtype == torch.float32 and not provider.enable_autocast
    return float32 and provider.transformer_impl != "local"


def token_multiple(provider: VisionLanguageFields) -> int:
    """The multiple of a rank's tokens that products of the text model's layers take: 16 in 8 bits, 32 in mxfp8, 128 in
    4 bits.
    """
    if provider.fp8:
        return get_fp8_align_size(provider.fp8_recipe)
    return get_fp4_align_size(provider.fp4_recipe) if provider.fp4 else 1


def sequence_ranks(provider: VisionLanguageFields) -> int:
    """Ranks over which hidden states between the linear layers are divided."""
    return provider.tensor_model_parallel_size if provider.sequence_parallel else 1


def _turn_off(settings: Any, name: str, why: str, *, level: int = logging.INFO) -> None:
    logger.log(level, "%s is set to False: %s", name, why)
    setattr(settings, name, False)


def complete_dist_train(provider: VisionLanguageFields) -> None:
    """Set parallel sizes of separate vision ranks that are None to 1: Megatron-Bridge divides by them."""
    split = provider.dist_train
    for name, value in vars(split).items():
        if split.use_dist_train and value is None and name.endswith("parallel_size"):
            setattr(split, name, 1)


# Megatron-Bridge's names of what transformers calls this.
YARN_FIELDS = {
    "factor": "yarn_rotary_scaling_factor",
    "truncate": "yarn_correction_range_round_to_int",
    **{
        name: f"yarn_{name}"
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    },
}


def complete_rope(provider: VisionLanguageFields) -> None:
    """Translate Megatron-Bridge's settings of YaRN, and add to a scaled rotary embedding what other fields say.

    Raises:
        ValueError: `rope_parameters` is malformed, or says something else than another field.
    """
    if provider.position_embedding_type == "yarn":
        values = {name: getattr(provider, field) for name, field in YARN_FIELDS.items()}
        if not values["mscale_all_dim"] and values["mscale"] in (None, 1.0):  # what it is without them
            values["mscale"] = values["mscale_all_dim"] = None
        if bool(values["mscale"]) != bool(values["mscale_all_dim"]):
            raise ValueError("yarn_mscale and yarn_mscale_all_dim: expected both above 0, or neither")
        given = {name: value for name, value in values.items() if value is not None}
        provider.rope_parameters = {"rope_type": "yarn"} | given | (provider.rope_parameters or {})
        provider.position_embedding_type = "mrope"
        for name in YARN_FIELDS.values():
            setattr(provider, name, None)
    if provider.rope_parameters is None:
        return
    other = {"rope_theta": provider.rotary_base, "mrope_section": list(provider.mrope_section)}
    if provider.rotary_percent != 1.0:
        other["partial_rotary_factor"] = provider.rotary_percent
    given = {name: value for name, value in provider.rope_parameters.items() if value is not None}
    rope = rope_parameters_of({"rope_parameters": other | given}, dict.fromkeys(other))
    for name, value in other.items():
        if rope[name] != value:
            raise ValueError(f"rope_parameters has {name} {rope[name]}, another field of the provider {value}")
    provider.rope_parameters = None if rope["rope_type"] == "default" else rope


def complete_before_finalize(provider: VisionLanguageFields) -> None:
    """Convert settings to megatron-core's values, turn off those without a kernel, and turn on what experts and split
    rows need; changes are logged. Called before megatron-core completes the fields.

    Raises:
        ValueError: an attention backend that is not megatron-core's, or an activation that no model here uses.
    """
    if provider.mtp_num_layers == 0:
        provider.mtp_num_layers = None  # megatron-core uses None for a model without such layers
    if provider.restore_modelopt_state:  # ModelOpt looks at weights before they are loaded, and refuses NaN
        provider.perform_initialization = True
    if provider.transformer_layer_spec is modelopt_transformer_layer_spec:
        logger.info(
            "transformer_layer_spec modelopt_transformer_layer_spec has no effect: ModelOpt quantises the layers that "
            "transformer_impl %r selects",
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
            "rows are split. Expected two values, the rank's part of the mean and what to report, as from this "
            "package's forward step; or calculate_per_token_loss=True",
            context,
        )


def complete_on_finalize(provider: VisionLanguageFields) -> None:
    """Turn off settings that are incorrect in the parameters' dtype, and set the dtype of what vision ranks send;
    changes are logged. Called after megatron-core has completed the fields.
    """
    for precision in ("fp8", "fp4"):
        if getattr(provider, precision):
            logger.info(
                "%s applies to the text model's layers; the vision tower computes in the dtype of its parameters",
                precision,
            )
    if attends_without_kernel(provider):
        logger.warning(
            "only Transformer Engine keeps all attention scores in float32, transformer_impl='local' does not"
        )
    native = provider.cross_entropy_loss_fusion and provider.cross_entropy_fusion_impl == "native"
    if native and provider.params_dtype == torch.float32:
        why = "of float32 logits the unfused loss needs less memory: it overwrites them"
        _turn_off(provider, "cross_entropy_loss_fusion", why)
    if provider.dist_train.use_dist_train and provider.pipeline_dtype is None:
        provider.pipeline_dtype = provider.params_dtype  # megatron-core sets it only under pipeline parallelism


def warn_of_unfused_attention(provider: VisionLanguageFields) -> None:
    """Warn where Transformer Engine has no kernel that trains on packed rows with this GPU and these heads.

    Source: Transformer Engine 2.16.1 asked with cuDNN 9.20, `get_attention_backend`. flash-attn has one for all.
    """
    if provider.transformer_impl == "local" or not torch.cuda.is_available():
        return
    (major, minor), width = torch.cuda.get_device_capability(), provider.kv_channels
    has_kernel = major == 9 or (major > 9 and width <= 128)  # Hopper, Blackwell
    if not has_kernel and importlib.util.find_spec("flash_attn") is None:
        logger.warning(
            "Transformer Engine has no kernel of cuDNN that trains on packed rows with heads of %d on compute "
            "capability %d.%d, and would keep all attention scores: expected flash-attn, whose kernels it takes then",
            width,
            major,
            minor,
        )


def complete_ddp(provider: VisionLanguageFields, ddp: DistributedDataParallelConfig | None, *, fsdp: bool) -> None:
    """Settings of the wrapper around a model that is trained, and of the model that depend on it; changes are logged.

    Gradients are summed if losses are divided by tokens; Megatron-Bridge's recipes average them. Under Megatron-FSDP
    megatron-core's layers overwrite a weight's `main_grad`, and drop the gradient from autograd: with fused gradients
    the output layer would learn only from the last chunk, and tied embeddings from only one of their two uses.
    """
    if ddp is not None and ddp.average_in_collective and provider.calculate_per_token_loss:
        why = (
            "with calculate_per_token_loss, gradients are summed over ranks and divided by the tokens of the global "
            "batch"
        )
        _turn_off(ddp, "average_in_collective", why)
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


def replicas_of(provider: VisionLanguageFields) -> Replicas:
    """Replicas of a provider with separate vision ranks."""
    split = provider.dist_train
    language_size = (
        provider.tensor_model_parallel_size * provider.pipeline_model_parallel_size * provider.context_parallel_size
    )
    return Replicas(
        vision=split.vision_world_size // (split.vision_tensor_model_parallel_size or 1),
        language=split.language_world_size // language_size,
    )


def vision_tensor_ranks(provider: VisionLanguageFields) -> int:
    """Ranks that share each layer of the vision tower."""
    split = provider.dist_train
    ranks = split.vision_tensor_model_parallel_size or 1
    return ranks if split.use_dist_train else provider.tensor_model_parallel_size


def trains_vision(provider: VisionLanguageFields) -> bool:
    """Whether some part of the vision tower is trained."""
    return not (provider.freeze_vision_model and provider.freeze_vision_projection)


# A group of megatron-core, and the group that it equals if weights are not gathered again for the backward pass.
_SAME_GROUPS = {"tp_ep_pp_with_egtp_remat": "tp_ep_pp", "dp_cp_gtp_remat": "dp_cp", "expt_dp_gtp_remat": "expt_dp"}


def complete_groups(provider: VisionLanguageFields, groups: ProcessGroupCollection | None, *, training: bool) -> None:
    """Set the groups that are None in Megatron-Bridge's collection for a module on separate ranks.

    megatron-core interprets None as all ranks for experts' gradient norms: language ranks would wait for a sum that
    vision ranks take for another one. For experts' metrics it interprets None as its global groups, which are not
    created here. A checkpoint of modules that is opened for inspection, without groups, is treated as one of a complete
    model.

    Raises:
        ValueError: separate vision ranks, and no groups.
    """
    if groups is None and not training:
        provider.dist_train, provider.add_encoder, provider.add_decoder = DistTrainConfig(), True, True
    if not provider.dist_train.use_dist_train:
        return
    if groups is None:
        raise ValueError("pg_collection is None with dist_train.use_dist_train, expected the groups of this module")
    for name, same in _SAME_GROUPS.items():
        if getattr(groups, name, None) is None:
            setattr(groups, name, getattr(groups, same))
