"""Megatron settings that no family's model supports, each with the only value that is accepted.

What lives here: these values. What may not: settings with several supported values, those of one family
(`models/*/refusals.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from qwen3vl_bridge.models.common.settings.rules import Row, only

from megatron.bridge.models.gpt_provider import default_layer_spec

NOTHING_ELSE = "this model implements nothing else"

FIXED: Mapping[str, Row] = {
    **only(
        "transformer_impl selects the layers",
        transformer_layer_spec=default_layer_spec,
        use_transformer_engine_full_layer_spec=False,
    ),
    **only(
        "rotary_base, mrope_section and rope_parameters define the rotary embedding",
        position_embedding_type="mrope",
        rotary_interleaved=False,
        rotary_scaling_factor=None,
        yarn_rotary_scaling_factor=None,
        rope_scaling=False,
        seq_len_interpolation_factor=None,
        no_rope_freq=None,
    ),
    **only(
        NOTHING_ELSE,
        # Attention.
        qk_layernorm=True,
        qk_l2_norm=False,
        add_qkv_bias=False,
        window_size=None,
        softmax_scale=None,
        softmax_type="vanilla",
        multi_latent_attention=False,
        # The rest of a layer.
        normalization="RMSNorm",
        apply_residual_connection_post_layernorm=False,
        gated_linear_unit=True,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
        add_bias_linear=False,
        use_mup=False,
        mtp_num_layers=None,
        mtp_enabled=False,
    ),
    **only("queries and keys are normalised after their projection: scaling it changes no attention", qk_clip=False),
    **only(
        "the model supports only tensor, pipeline, context and expert parallelism; with others, ranks would see the "
        "wrong tokens",
        hierarchical_context_parallel_sizes=None,
        hybrid_context_parallel=False,
        tensor_parallel_num_weight_shards=None,
        gtp_weight_remat_size=1,
    ),
    **only(
        "it requires a forward step with features that ours lacks",
        overlap_moe_expert_parallel_comm=False,
        num_microbatches_with_partial_activation_checkpoints=None,
    ),
    **only("torch has no ring exchange", use_ring_exchange_p2p=False),
    **only("the vision tower is the one of this package", use_hf_vision_model=False),
}

FIXED_WITH_EXPERTS: Mapping[str, Row] = {
    **FIXED,
    # Source: transformers, Qwen3VLMoeTextTopKRouter, Qwen3_5MoeTopKRouter.
    **only(
        "routing weights are a softmax over all experts, renormalised over the selected ones",
        moe_router_score_function="softmax",
        moe_router_pre_softmax=False,
        moe_router_topk_scaling_factor=None,
        moe_router_num_groups=None,
        moe_router_enable_expert_bias=False,
        moe_router_force_biased=None,
    ),
    **only(NOTHING_ELSE, moe_mlp_glu_interleave_size=None, moe_latent_size=None),
    **only(
        "a full expert would drop tokens, and padding could displace real ones",
        moe_expert_capacity_factor=None,
        moe_token_dropping=False,
        moe_expert_rank_capacity_factor=None,
    ),
    **only("megatron-core adds this noise during evaluation too", moe_input_jitter_eps=None),
    **only(
        "experts are split only by expert_model_parallel_size and expert_tensor_parallel_size",
        expert_tensor_parallel_num_weight_shards=None,
        expert_gtp_weight_remat_size=1,
    ),
}
