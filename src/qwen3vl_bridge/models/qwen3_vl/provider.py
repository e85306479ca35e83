"""The provider: everything that defines a Qwen3-VL model and how it is trained, as one dataclass.

What lives here: fields with Megatron-Bridge's names, and their checks. What may not: reading Hugging Face
configurations (`bridge.py`), the vision tower's own configuration (`vision_config.py`), modules (`models/`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from qwen3vl_bridge.models.common.provider_flops import operations_of_a_step, provider_sizes
from qwen3vl_bridge.models.common.settings import kernels, parallelism
from qwen3vl_bridge.models.common.settings.activations import name_of
from qwen3vl_bridge.models.common.settings.encoder_parallel import (
    DistTrainConfig,
    check_dist_train,
    complete_dist_train,
    complete_groups,
)
from qwen3vl_bridge.models.common.settings.experts import check_experts, layers_with_experts
from qwen3vl_bridge.models.common.settings.recompute import check_recompute
from qwen3vl_bridge.models.qwen3_vl.config_dimensions import FAMILY
from qwen3vl_bridge.models.qwen3_vl.fixed_settings import FIXED, FIXED_WITH_EXPERTS
from qwen3vl_bridge.models.qwen3_vl.upstream_names import UpstreamExpertNames, UpstreamNames, check_names
from qwen3vl_bridge.models.qwen3_vl.vision_config import check_vision
from qwen3vl_bridge.weights.dimensions import Dimensions, indices_of

import torch
import torch.nn.functional as F
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import Qwen3VLVisionConfig

if TYPE_CHECKING:
    from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLGPTModel


@dataclass
class Qwen3VLModelProvider(UpstreamNames, GPTModelProvider):
    """A dense Qwen3-VL model, and what models with experts share with it.

    The inherited fields describe the text model. All token ids and defaults are the released models'.

    Attributes:
        vision_config: the vision tower, as transformers describes it.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id, bos_token_id, eos_token_id: ids.
        pad_token_id: where a caller's rows come without any mask, a run of it at a row's end is padding. None: every
            token is real.
        mrope_section: rotary frequencies of the temporal, height and width axis.
        rope_parameters: a scaled rotary embedding (YaRN and the like) as transformers describes it, or None.
        freeze_language_model, freeze_vision_model, freeze_vision_projection: parts that are not trained. The vision
            projection is the patch mergers.
        vision_recompute_granularity, vision_recompute_modules, vision_recompute_method, vision_recompute_num_layers:
            activation recomputation of the vision tower, as the fields without `vision_` are of the text model.
        apply_rotary_pos_emb_in_fp32: rotate queries and keys of the text model in float32; those of the tower always
            are.
        calculate_per_token_loss: whether losses are summed over tokens and divided once by those of the global batch,
            however they are packed, as this package's recipes have it. None: as Megatron-Bridge, under context
            parallelism alone (and with `dist_train`); else each microbatch's mean counts alike.
        vision_dp_when_cp: whether context-parallel ranks share the pictures' work. They always do here.
        use_hf_vision_model, vision_cuda_graph_impl, vision_cuda_graph_scope, max_vision_cuda_graph_seq_length: settings
            of Megatron-Bridge's own model that have one value here.
        dist_train: the vision tower and the language model on ranks of their own.
        add_encoder, add_decoder: which of the two this rank has; Megatron-Bridge's set-up says so.
    """

    vision_config: Qwen3VLVisionConfig = field(default_factory=Qwen3VLVisionConfig)

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    bos_token_id: int = 151643
    eos_token_id: int = 151645
    pad_token_id: int | None = None

    normalization: str = "RMSNorm"
    layernorm_epsilon: float = 1e-6
    gated_linear_unit: bool = True
    activation_func: object = F.silu
    add_bias_linear: bool = False
    qk_layernorm: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    position_embedding_type: str = "mrope"
    rotary_base: float = 5_000_000.0
    mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])
    rope_parameters: dict[str, Any] | None = None
    scatter_embedding_sequence_parallel: bool = False
    share_embeddings_and_output_weights: bool = False

    transformer_impl: str = field(default_factory=kernels.default_transformer_impl)
    gradient_accumulation_fusion: bool = field(default_factory=kernels.can_fuse_weight_gradients)
    bias_activation_fusion: bool = True
    cross_entropy_loss_fusion: bool = True  # but where it would round: finalize() says so
    apply_rotary_pos_emb_in_fp32: bool = False
    # megatron-core refuses rows of several lengths between pipeline stages with its own default, experts or not.
    moe_token_dispatcher_type: str = "alltoall"
    calculate_per_token_loss: bool | None = None

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

    fixed: ClassVar[Mapping[str, Any]] = FIXED
    # Megatron-Bridge looks for it where it logs TFLOP/s.
    _get_num_floating_point_operations_with_runtime_stats = operations_of_a_step

    def finalize(self) -> None:
        """Check the fields and complete them.

        Raises:
            ValueError: fields that contradict each other, or that this model would ignore.
        """
        kernels.complete_kernels(self)
        parallelism.complete_parallel(self)
        check_vision(self)
        for name, only in self.fixed.items():
            if getattr(self, name) != only:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {only!r}: this model has nothing else")
        name_of(self.activation_func)
        check_names(self)
        check_recompute(self)
        parallelism.check_sizes(self)
        kernels.check_kernels(self)
        super().finalize()
        kernels.complete_precision(self)
        parallelism.check_parallel(self)
        check_dist_train(self)
        complete_dist_train(self)
        if 2 * sum(self.mrope_section) != self.kv_channels:
            raise ValueError(
                f"mrope_section {self.mrope_section} has sum {sum(self.mrope_section)}, expected half the head "
                f"dimension, {self.kv_channels // 2}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy, such as layers of experts make; what talks to other ranks is the same in it."""
        if (talks := getattr(self, "_p2p_communicator", None)) is not None:
            memo[id(talks)] = talks
        return super().__deepcopy__(memo)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the output layer."""
        if not self.should_pad_vocab:
            return self.vocab_size
        return calculate_padded_vocab_size(
            self.vocab_size, self.make_vocab_size_divisible_by, self.tensor_model_parallel_size
        )

    def dimensions(self) -> Dimensions:
        """What the weight table's symbols stand for; the vocabulary without padding."""
        indices = indices_of(
            layers=self.num_layers,
            moe_layers=self.moe_layers,
            experts=self.num_moe_experts or 0,
            vision_layers=self.vision_config.depth,
            tapped_layers=self.vision_config.deepstack_visual_indexes,
        )
        return Dimensions(provider_sizes(self), indices, FAMILY)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return ()

    def provide(self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None):
        """Build the model of one pipeline stage, or the one of its two modules that this rank has.

        Args:
            pre_process: whether it embeds; None to tell from the rank.
            post_process: whether it puts out logits or losses; None to tell from the rank.
            vp_stage: virtual pipeline stage, or None.
        """
        from qwen3vl_bridge.encoder_parallel.modules import Qwen3VLDecoder, Qwen3VLEncoder
        from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLModel

        groups = self._groups()
        pre_process, post_process = self._ends(pre_process, post_process, vp_stage)
        with self._device():
            if not self.add_decoder:
                model = Qwen3VLEncoder(self, groups)
            else:
                kind = Qwen3VLModel if self.add_encoder else Qwen3VLDecoder
                model = kind(self, groups, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        model.freeze(
            freeze_language_model=self.freeze_language_model,
            freeze_vision_model=self.freeze_vision_model,
            freeze_vision_projection=self.freeze_vision_projection,
        )
        return model

    def provide_language_model(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> Qwen3VLGPTModel:
        """Build the text model of one pipeline stage alone; arguments as `provide`'s."""
        from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLGPTModel

        pre_process, post_process = self._ends(pre_process, post_process, vp_stage)
        with self._device():
            return Qwen3VLGPTModel(
                self, self._groups(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
            )

    def _groups(self) -> ProcessGroupCollection:
        """Those that were set, or megatron-core's own: a caller of `provide` alone has set none."""
        if self._pg_collection is None:
            self._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        return self._pg_collection

    def _ends(self, pre_process: bool | None, post_process: bool | None, vp_stage: int | None) -> tuple[bool, bool]:
        """Whether a stage embeds, and whether it puts out; of the rank where that is not given."""
        groups, vp_size = self._groups(), self.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_first_stage(groups.pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_last_stage(groups.pp)
        return pre_process, post_process

    def _device(self) -> contextlib.AbstractContextManager:
        return torch.device("meta") if self.init_model_with_meta_device else contextlib.nullcontext()

    def provide_distributed_model(self, *args: Any, **kwargs: Any) -> list[torch.nn.Module]:
        """As ModelProviderMixin's; says how many parameters of each part are trained, adapters counted in.

        Raises:
            ValueError: it is to be wrapped for training, and could not be trained as it is split.
        """
        from qwen3vl_bridge.models.common.freezing import log_trained_parameters

        given = inspect.signature(super().provide_distributed_model).bind(*args, **kwargs).arguments
        if training := given.get("wrap_with_ddp", True):
            parallelism.check_training(self)
            kernels.check_float32(self)
            parallelism.complete_ddp(self, given.get("ddp_config"))
        complete_groups(self, given.get("pg_collection"), training=training)
        model = super().provide_distributed_model(*args, **kwargs)
        log_trained_parameters(model)
        return model


@dataclass
class Qwen3VLMoEModelProvider(UpstreamExpertNames, Qwen3VLModelProvider):
    """A Qwen3-VL model with experts, and only what differs from the dense one.

    Attributes:
        moe_layer_freq: 1 for each layer with experts, 0 for each dense one (or megatron-core's other spellings).
        moe_grouped_gemm: experts of a rank as one grouped product; Transformer Engine's.
        allow_random_routing: accept `moe_router_force_load_balancing`, with which tokens go to experts at random. That
            is for measuring speed; what is trained so is lost.
    """

    num_moe_experts: int | None = 128
    moe_router_topk: int = 8
    moe_ffn_hidden_size: int | None = 768
    moe_router_dtype: str | None = "fp32"
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_aux_loss_coeff: float | list[float] = 1e-3
    moe_grouped_gemm: bool = field(default_factory=kernels.has_transformer_engine)
    moe_permute_fusion: bool = field(default_factory=kernels.has_transformer_engine)
    allow_random_routing: bool = False

    fixed: ClassVar[Mapping[str, Any]] = FIXED_WITH_EXPERTS

    def finalize(self) -> None:
        """Check the fields and complete them.

        Raises:
            ValueError: fields that contradict each other, or that this model would ignore.
        """
        check_experts(self)
        super().finalize()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, as megatron-core reads `moe_layer_freq`."""
        return layers_with_experts(self)
