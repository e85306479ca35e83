"""The vision tower's transformer configuration and its FLOPs, derived from the provider."""

from __future__ import annotations

from qwen3vl_bridge.batch import VisionWork
from qwen3vl_bridge.models.flops import vision_costs
from qwen3vl_bridge.models.settings import VisionLanguageFields, vision_activation, vision_tensor_ranks
from qwen3vl_bridge.weights.dimensions import vision_sizes

from megatron.bridge.models.transformer_config import TransformerConfig

# transformers, Qwen3VLVisionModel: every norm of the tower has this epsilon; there is no configuration field for it.
_NORM_EPSILON = 1e-6

_SHARED = (
    "params_dtype",
    "bf16",
    "fp16",
    "transformer_impl",
    "use_cpu_initialization",
    "init_model_with_meta_device",
    "perform_initialization",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "deterministic_mode",
)


def vision_transformer_config(provider: VisionLanguageFields) -> TransformerConfig:
    """Configuration of the vision tower's transformer block. On separate ranks it has its own parallel sizes."""
    vision = provider.vision_config
    config = TransformerConfig(
        num_layers=vision.depth,
        hidden_size=vision.hidden_size,
        num_attention_heads=vision.num_heads,
        num_query_groups=vision.num_heads,
        kv_channels=vision.hidden_size // vision.num_heads,
        ffn_hidden_size=vision.intermediate_size,
        normalization="LayerNorm",
        layernorm_epsilon=_NORM_EPSILON,
        activation_func=vision_activation(vision.hidden_act),
        gated_linear_unit=False,
        add_bias_linear=True,
        add_qkv_bias=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        init_method_std=vision.initializer_range,
        recompute_granularity=provider.vision_recompute_granularity,
        recompute_modules=provider.vision_recompute_modules,
        recompute_method=provider.vision_recompute_method,
        recompute_num_layers=provider.vision_recompute_num_layers,
        tensor_model_parallel_size=vision_tensor_ranks(provider),
        **{name: getattr(provider, name) for name in _SHARED},
    )
    config.finalize()
    return config


def vision_work(provider: VisionLanguageFields) -> VisionWork:
    """The tower's cost of a frame, by which ranks divide frames."""
    vision = provider.vision_config
    sizes = {**vision_sizes(vision.to_dict()), "hidden": provider.hidden_size}
    patch, patch_pair = vision_costs(sizes, vision.depth, len(provider.deepstack_layers))
    return VisionWork(patch, patch_pair, vision.spatial_merge_size**2)
