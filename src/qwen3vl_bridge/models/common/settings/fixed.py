"""Settings of Megatron's configuration that no family's model follows, each with the only value it may have.

What lives here: the values; a provider's `finalize` refuses others. What may not: settings with a choice, those of one
family (`models/*/fixed_settings.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.gpt_provider import default_layer_spec

FIXED: Mapping[str, Any] = {
    "transformer_layer_spec": default_layer_spec,
    "use_transformer_engine_full_layer_spec": False,
    # Rotary embedding: `rotary_base`, `mrope_section` and `rope_parameters` say all.
    "position_embedding_type": "mrope",
    "rotary_interleaved": False,
    "rotary_scaling_factor": None,
    "yarn_rotary_scaling_factor": None,
    "rope_scaling": False,
    "seq_len_interpolation_factor": None,
    "no_rope_freq": None,
    # Attention.
    "qk_layernorm": True,
    "qk_l2_norm": False,
    "add_qkv_bias": False,
    "window_size": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "multi_latent_attention": False,
    # The rest of a layer.
    "normalization": "RMSNorm",
    "apply_residual_connection_post_layernorm": False,
    "gated_linear_unit": True,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "add_bias_linear": False,
    "use_mup": False,
    "mtp_num_layers": None,
    "mtp_enabled": False,
    # How it is split. Ranks of other kinds than `parallel_settings` knows would see other tokens than they are given.
    "hierarchical_context_parallel_sizes": None,
    "hybrid_context_parallel": False,
    "tensor_parallel_num_weight_shards": None,
    "gtp_weight_remat_size": 1,
    "overlap_moe_expert_parallel_comm": False,
    # megatron-core's schedules: torch has no ring exchange, and the second asks a forward step for what ours has not.
    "use_ring_exchange_p2p": False,
    "num_microbatches_with_partial_activation_checkpoints": None,
    # The vision tower is this package's.
    "use_hf_vision_model": False,
}

FIXED_WITH_EXPERTS: Mapping[str, Any] = {
    **FIXED,
    # The chosen experts' weights add up to one. Source: transformers, Qwen3VLMoeTextTopKRouter, Qwen3_5MoeTopKRouter.
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_force_biased": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_latent_size": None,
    # A full expert would drop tokens, and padding would push real ones out.
    "moe_expert_capacity_factor": None,
    "moe_token_dropping": False,
    "moe_expert_rank_capacity_factor": None,
    # Noise, which megatron-core adds in evaluation too.
    "moe_input_jitter_eps": None,
    "expert_tensor_parallel_num_weight_shards": None,
    "expert_gtp_weight_remat_size": 1,
}
