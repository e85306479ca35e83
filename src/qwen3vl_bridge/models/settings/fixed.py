"""Megatron settings that no family's model supports, each with the only value that is accepted.

Which settings nothing reads was found by a search of the installed megatron-core and Megatron-Bridge and of this
package for every field's readers, and by recording which fields runs read (docs/settings.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from qwen3vl_bridge.models.settings.fields import VisionLanguageFields
from qwen3vl_bridge.models.settings.rules import Row, When, at_default, only

from megatron.bridge.models.gpt_provider import default_layer_spec

NOTHING_ELSE = "this model implements nothing else"


def unread(names: str) -> dict[str, Row]:
    """Rows of settings that nothing reads for a model."""
    return at_default(VisionLanguageFields, names, "nothing reads it for this model")


# By the part of megatron-core that reads them, which no family's model has.
UNREAD: Mapping[str, Row] = unread(
    # other position embeddings
    "rope_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_mscale "
    "yarn_mscale_all_dim yarn_correction_range_round_to_int "
    # the embedding's own scatter over ranks; images are added before
    "scatter_embedding_sequence_parallel clone_scatter_output_in_embedding "
    # other attention
    "window_attn_skip_freq dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq "
    "dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend "
    "dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon "
    "dsa_indexer_k_norm_fp32 "
    # other layers
    "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_training_ssm_states_dtype "
    "use_mamba_mem_eff_path mtp_hybrid_override_pattern memory_efficient_layer_norm use_fused_weighted_squared_relu "
    "dense_grouped_gemm use_grouped_gemm_for_dense_mlp "
    # muP
    "mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power "
    # other routers
    "moe_router_quantile_balancing_ema moe_token_drop_policy "
    # the inference engine, and its data
    "flash_decode inference_rng_tracker inference_sampling_seed inference_fuse_tp_communication "
    "inference_disable_triton_nvls_kernels inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
    "inference_moe_token_dispatcher_type use_inference_optimized_layers nccl_all_reduce_for_prefill "
    "mlp_chunks_for_prefill moe_pad_experts_for_cuda_graph_inference max_seqlen_per_dp_cp_rank "
    # ModelOpt's layers
    "use_arbitrary_attention_mask"
)

FIXED: Mapping[str, Row] = {
    **UNREAD,
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
        is_hybrid_model=False,
        heterogeneous_block_specs=False,
        mtp_num_layers=None,
        mtp_enabled=False,
    ),
    **only("ModelOpt's quantised, pruned or distilled models have other layers", restore_modelopt_state=False),
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
        moe_router_topk_limited_devices=None,
        moe_router_enable_expert_bias=False,
        moe_router_force_biased=None,
    ),
    **only(
        NOTHING_ELSE,
        moe_mlp_glu_interleave_size=None,
        moe_shared_expert_glu_interleave_size=None,
        moe_latent_size=None,
    ),
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

# Settings of something that another setting turns on.
_PARTS = {
    "cuda_graph_impl": "cuda_graph_warmup_steps cuda_graph_use_single_mempool cuda_graph_retain_backward_graph "
    "delay_offload_until_cuda_graph",
    "cpu_offloading": "cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
    "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers",
    "fine_grained_activation_offloading": "offload_modules min_offloaded_tensor_size activation_offload_fraction "
    "delta_offload_bytes_across_pp_ranks fine_grained_offloading_max_inflight_offloads",
    "moe_paged_stash": "moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda "
    "moe_paged_stash_buffer_size_factor_cpu",
    "qk_clip": "qk_clip_alpha qk_clip_threshold",
    "tp_comm_overlap": "tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
    "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs "
    "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_overlap_cfg",
}


def _off(switch: str) -> When:
    return When(switch, lambda provider: getattr(provider, switch) in (None, False, "none"))


PARTS: Mapping[str, Row] = {
    name: row
    for switch, names in _PARTS.items()
    for name, row in at_default(VisionLanguageFields, names, "it would be ignored", when=_off(switch)).items()
}
