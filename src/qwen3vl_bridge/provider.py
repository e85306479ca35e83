"""The provider: everything that defines a Qwen3-VL model and how it is trained, as one dataclass.

What lives here: fields with Megatron-Bridge's names, their checks, and the configuration of the vision tower derived
from them. What may not: reading Hugging Face configurations (`bridge.py`), modules (`model/`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec
from megatron.bridge.models.transformer_config import TransformerConfig
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from transformers import Qwen3VLVisionConfig

# transformers, Qwen3VLVisionModel: every norm of the tower has this epsilon; no configuration field holds it.
_VISION_NORM_EPSILON = 1e-6


def default_transformer_impl() -> str:
    """Transformer Engine where it is installed and there is a GPU for it, else modules of torch and megatron-core."""
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    return "transformer_engine" if has_engine and torch.cuda.is_available() else "local"


@dataclass
class Qwen3VLModelProvider(GPTModelProvider):
    """A dense Qwen3-VL model.

    The inherited fields describe the text model. All token ids and defaults are the released models'.

    Attributes:
        vision_config: the vision tower, as transformers describes it.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id, bos_token_id, eos_token_id: ids.
        mrope_section: rotary frequencies of the temporal, height and width axis.
        freeze_language_model, freeze_vision_model, freeze_vision_projection: parts that are not trained. The vision
            projection is the patch mergers.
        vision_recompute_granularity, vision_recompute_method, vision_recompute_num_layers: activation recomputation
            of the vision tower, as the fields without `vision_` are of the text model.
    """

    vision_config: Qwen3VLVisionConfig = field(default_factory=Qwen3VLVisionConfig)

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    bos_token_id: int = 151643
    eos_token_id: int = 151645

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
    scatter_embedding_sequence_parallel: bool = False
    share_embeddings_and_output_weights: bool = False

    transformer_impl: str = field(default_factory=default_transformer_impl)
    # Losses are summed over tokens and divided once by the tokens of the global batch, however they are packed.
    calculate_per_token_loss: bool = True
    # megatron-core's fused loss hands back its gradient in bfloat16 whatever the precision of the logits.
    cross_entropy_loss_fusion: bool = False

    freeze_language_model: bool = False
    freeze_vision_model: bool = False
    freeze_vision_projection: bool = False

    vision_recompute_granularity: str | None = None
    vision_recompute_method: str | None = None
    vision_recompute_num_layers: int | None = None

    def finalize(self) -> None:
        """Check the fields and complete them.

        Raises:
            ValueError: fields that contradict each other, or that this model would ignore.
        """
        text_width, vision_width = self.hidden_size, self.vision_config.out_hidden_size
        taps, layers = self.vision_config.deepstack_visual_indexes, self.vision_config.depth
        if text_width != vision_width:
            raise ValueError(f"vision_config.out_hidden_size is {vision_width}, expected hidden_size {text_width}")
        if list(taps) != sorted(set(taps)) or (taps and not 0 <= taps[0] <= taps[-1] < layers):
            raise ValueError(f"deepstack_visual_indexes is {taps}, expected ascending layers below {layers}")
        if len(taps) > self.num_layers:
            raise ValueError(f"{len(taps)} DeepStack taps need as many text layers, num_layers is {self.num_layers}")
        for name, only in _FIXED.items():
            if getattr(self, name) != only:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {only!r}: this model has nothing else")
        self._check_vision_recompute()
        super().finalize()
        if self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "native" and not self.bf16:
            raise ValueError(
                f"cross_entropy_loss_fusion is True with parameters in {self.params_dtype}: megatron-core's native "
                "fused loss rounds its gradient to bfloat16. Set it to False, or cross_entropy_fusion_impl to 'te'"
            )
        if 2 * sum(self.mrope_section) != self.kv_channels:
            raise ValueError(
                f"mrope_section {self.mrope_section} has sum {sum(self.mrope_section)}, expected half the head "
                f"dimension, {self.kv_channels // 2}"
            )

    def _check_vision_recompute(self) -> None:
        # megatron-core keeps a tapped layer's output only at the end of a recomputed chunk, and is silent otherwise.
        if self.vision_recompute_granularity == "full" and self.vision_recompute_method == "uniform":
            chunk = self.vision_recompute_num_layers or 1
            lost = [tap for tap in self.vision_config.deepstack_visual_indexes if (tap + 1) % chunk]
            if lost:
                raise ValueError(
                    f"vision_recompute_num_layers is {chunk}; DeepStack taps {lost} don't end a chunk of {chunk} "
                    "layers and would be lost. Use 1"
                )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the output layer."""
        if not self.should_pad_vocab:
            return self.vocab_size
        return calculate_padded_vocab_size(
            self.vocab_size, self.make_vocab_size_divisible_by, self.tensor_model_parallel_size
        )

    def vision_transformer_config(self) -> TransformerConfig:
        """Configuration of the vision tower's transformer block. It is tensor-parallel as the text model is."""
        vision = self.vision_config
        config = TransformerConfig(
            num_layers=vision.depth,
            hidden_size=vision.hidden_size,
            num_attention_heads=vision.num_heads,
            num_query_groups=vision.num_heads,
            kv_channels=vision.hidden_size // vision.num_heads,
            ffn_hidden_size=vision.intermediate_size,
            normalization="LayerNorm",
            layernorm_epsilon=_VISION_NORM_EPSILON,
            activation_func=_vision_activation(vision.hidden_act),
            gated_linear_unit=False,
            add_bias_linear=True,
            add_qkv_bias=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bias_activation_fusion=False,
            init_method_std=vision.initializer_range,
            recompute_granularity=self.vision_recompute_granularity,
            recompute_method=self.vision_recompute_method,
            recompute_num_layers=self.vision_recompute_num_layers,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            **{name: getattr(self, name) for name in _SHARED_WITH_VISION},
        )
        config.finalize()
        return config

    def provide(self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None):
        """Build the model of one pipeline stage.

        Args:
            pre_process: whether it embeds; None to tell from the rank.
            post_process: whether it puts out logits or losses; None to tell from the rank.
            vp_stage: virtual pipeline stage, or None.

        Returns:
            Qwen3VLModel.
        """
        from qwen3vl_bridge.model.qwen3vl import Qwen3VLModel

        groups, vp_size = self._pg_collection, self.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_first_stage(groups.pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_last_stage(groups.pp)
        with torch.device("meta") if self.init_model_with_meta_device else contextlib.nullcontext():
            model = Qwen3VLModel(self, groups, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        model.freeze(
            freeze_language_model=self.freeze_language_model,
            freeze_vision_model=self.freeze_vision_model,
            freeze_vision_projection=self.freeze_vision_projection,
        )
        return model


# Settings of the inherited configuration that this model does not follow, and what it does.
_FIXED = {
    "position_embedding_type": "mrope",
    "rotary_percent": 1.0,
    "rope_scaling": False,
    "seq_len_interpolation_factor": None,
    "apply_rope_fusion": False,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "window_size": None,
    "softmax_scale": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "num_moe_experts": None,
    "transformer_layer_spec": default_layer_spec,
}

_SHARED_WITH_VISION = (
    "params_dtype",
    "bf16",
    "fp16",
    "transformer_impl",
    "use_cpu_initialization",
    "perform_initialization",
    "gradient_accumulation_fusion",
    "deterministic_mode",
)


def _vision_activation(name: str):
    if name != "gelu_pytorch_tanh":
        raise ValueError(f"vision_config.hidden_act is {name!r}, expected 'gelu_pytorch_tanh'")
    return functools.partial(F.gelu, approximate="tanh")
