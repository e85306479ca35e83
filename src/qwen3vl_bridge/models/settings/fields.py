"""The fields of a provider: everything that defines a model, how it is computed and how it is split."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.tensor_parallel import layers


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


@dataclass
class DistTrainConfig:
    """Megatron-Bridge's fields for training vision tower and language model on separate ranks.

    Attributes:
        use_dist_train: whether to use separate ranks.
        vision_world_size: ranks of the vision tower, the first ones.
        language_world_size: ranks of the language model, all others.
        vision_tensor_model_parallel_size: tensor parallelism of the tower; the rest of its ranks are data-parallel.
        vision_pipeline_model_parallel_size, vision_context_parallel_size: 1; the tower has neither.
        vision_expert_tensor_parallel_size, vision_expert_model_parallel_size: 1; it has no experts.
        vision_to_llm_dp_ratio: replicas of the tower per replica of the language model. None to compute it; it must be
            None if the tower has fewer replicas.
    """

    use_dist_train: bool = False
    vision_world_size: int | None = None
    language_world_size: int | None = None
    vision_tensor_model_parallel_size: int = 1
    vision_pipeline_model_parallel_size: int = 1
    vision_context_parallel_size: int = 1
    vision_expert_tensor_parallel_size: int = 1
    vision_expert_model_parallel_size: int = 1
    vision_to_llm_dp_ratio: int | None = None


@dataclass
class VisionLanguageFields(GPTModelProvider):
    """Fields of a vision tower and a language model. The inherited ones describe the language model.

    Attributes:
        vision_config: transformers' configuration of the vision tower.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id, bos_token_id, eos_token_id: ids.
        pad_token_id: if a caller's rows come without any mask, a sequence of this id at a row's end is padding. None:
            every token is real.
        mrope_section: rotary frequencies of the temporal, height and width axis.
        rope_parameters: a scaled rotary embedding (such as YaRN) in transformers' format, or None.
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
        vision_dp_when_cp: whether context-parallel ranks divide the images; here they always do.
        use_hf_vision_model, vision_cuda_graph_impl, vision_cuda_graph_scope, max_vision_cuda_graph_seq_length: settings
            of Megatron-Bridge's own model that allow only one value here.
        dist_train: separate ranks for the vision tower and the language model.
        add_encoder, add_decoder: which of the two this rank has, set by Megatron-Bridge's set-up.
    """

    # transformers' configuration of the tower
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
    cross_entropy_loss_fusion: bool = True  # except where it would round: finalize() reports that
    apply_rotary_pos_emb_in_fp32: bool = False
    # megatron-core refuses rows of several lengths between pipeline stages with its own default, experts or not.
    moe_token_dispatcher_type: str = "alltoall"
    calculate_per_token_loss: bool | None = None
    # With Qwen3-VL's vocabulary 8,192 tokens' logits, their softmax and its gradient take 10 GB, for which GPUs have
    # room; rows up to there pay nothing. Longer ones pay a product of the output layer more, some 3 % of an 8B's step.
    loss_chunk_tokens: int = 8192

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
        """Layers of the tower that have a DeepStack merger."""
        return tuple(getattr(self.vision_config, "deepstack_visual_indexes", None) or ())

    @property
    def trains_mtp(self) -> bool:
        """Whether multi-token prediction is trained, in families that have it."""
        return bool(self.mtp_num_layers and self.mtp_loss_scaling_factor)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return ()
