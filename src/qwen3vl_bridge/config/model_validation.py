"""Checks of a provider. They raise for settings that would be ignored, fail later, or train something unexpected.

The names in capitals are tables of checks. `finalize()` of a provider runs PARALLEL_SIZES, MOE or DENSE, the family's
own `checks` and BEFORE_FINALIZE, then lets megatron-core complete the fields, and then runs AFTER_FINALIZE.
MODEL_CAN_TRAIN runs when a run is validated and when a model is built for training. Before its first forward pass, and
again after a setting has changed, a model runs MODEL_CAN_TRAIN in training mode and ON_FORWARD in evaluation mode.
`training/run_validation.py` lists the order of all tables in a run.

Settings that megatron-core or Megatron-Bridge reject with a clear message are not checked here. The settings that no
code reads were found by searching the installed megatron-core, Megatron-Bridge and this package, and by recording the
fields that runs read (docs/settings.md).
"""

from __future__ import annotations

import math

from qwen3vl_bridge import registry
from qwen3vl_bridge.config import fields
from qwen3vl_bridge.config.checks import (
    IGNORED,
    Check,
    Requires,
    at_least,
    check_provider_names,
    differs,
    equals,
    is_above,
    is_off,
    is_on,
    multiple_of,
    not_installed,
    one_of,
    requires_default,
    requires_default_while_off,
    run_checks,
    same_as,
)
from qwen3vl_bridge.config.divisibility import check_row_length, indivisible_sizes, misaligned_dims
from qwen3vl_bridge.config.fields import VisionLanguageFields
from qwen3vl_bridge.config.hf_config import check_mrope_section, check_tower_size

import torch
from megatron.bridge.models.gpt_provider import modelopt_transformer_layer_spec
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.utils import get_te_version, is_te_min_version

_TP, _PP, _CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
_VPP = "virtual_pipeline_model_parallel_size"
_VISION_RANKS, _LANGUAGE_RANKS = "dist_train.vision_world_size", "dist_train.language_world_size"
_VISION_TP = "dist_train.vision_tensor_model_parallel_size"
_DIST_TRAIN = is_on("dist_train.use_dist_train")
_LOCAL, _NOT_LOCAL = equals("transformer_impl", "local"), differs("transformer_impl", "local")
# First release of Transformer Engine whose unfused attention, which float32 needs, supports packed rows. Padded rows
# and images are computed as packed rows too. Source: transformer_engine/pytorch/attention/dot_product_attention of
# releases 2.8 to 2.18.
PACKED_UNFUSED = "2.11"

# This table runs first, because other checks divide by parallel sizes.
PARALLEL_SIZES: tuple[Check, ...] = tuple(
    Requires(name, at_least(1), also=(None,))
    for name in (_TP, _PP, _VPP, _CP, "expert_model_parallel_size", "expert_tensor_parallel_size")
)

# --- Settings that must keep the default of the provider's class ---

FIXED_ARCHITECTURE = "this model implements nothing else"
_SELECTS_LAYERS = "transformer_impl selects the layers"


def ignored_settings(names: str) -> tuple[Requires, ...]:
    """Return checks that raise if one of the settings `names`, which no code reads, does not have its default value.

    The names are separated by spaces.
    """
    return requires_default(names, "no code reads it for this model", also=(None,), any_off=True)


# Grouped by the component of megatron-core that reads the settings. No family's model has these components.
IGNORED_SETTINGS = ignored_settings(
    # other position embeddings
    "rope_scaling_factor "
    # the model scatters embeddings over ranks after it has inserted images
    "scatter_embedding_sequence_parallel clone_scatter_output_in_embedding "
    # other attention
    "window_attn_skip_freq "
    # other layers
    "use_mamba_mem_eff_path mtp_hybrid_override_pattern memory_efficient_layer_norm use_fused_weighted_squared_relu "
    "dense_grouped_gemm use_grouped_gemm_for_dense_mlp "
    # other routers
    "moe_router_quantile_balancing_ema moe_token_drop_policy "
    # the inference engine and its data
    "flash_decode inference_rng_tracker inference_sampling_seed inference_fuse_tp_communication "
    "inference_disable_triton_nvls_kernels inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
    "inference_moe_token_dispatcher_type use_inference_optimized_layers nccl_all_reduce_for_prefill "
    "mlp_chunks_for_prefill moe_pad_experts_for_cuda_graph_inference max_seqlen_per_dp_cp_rank "
    # ModelOpt's layers
    "use_arbitrary_attention_mask "
    # sparse attention, state-space layers and muP
    + " ".join(
        name for name in VisionLanguageFields.__dataclass_fields__ if name.startswith(("dsa_", "mamba_", "mup_"))
    )
)

FIXED: tuple[Check, ...] = (
    *IGNORED_SETTINGS,
    *requires_default("transformer_layer_spec", _SELECTS_LAYERS, also=(modelopt_transformer_layer_spec,)),
    *requires_default("use_transformer_engine_full_layer_spec", _SELECTS_LAYERS),
    *requires_default(
        "position_embedding_type rotary_interleaved rotary_scaling_factor rope_scaling seq_len_interpolation_factor "
        "no_rope_freq",
        "rotary_base, mrope_section and rope_parameters define the rotary embedding",
    ),
    *requires_default(
        " ".join(fields.YARN_FIELDS.values()),
        "it is read only with position_embedding_type='yarn'; set that, or rope_parameters",
    ),
    *requires_default(
        # attention
        "qk_layernorm qk_l2_norm add_qkv_bias attention_output_gate window_size softmax_scale softmax_type "
        "multi_latent_attention experimental_attention_variant "
        # the rest of a layer
        "normalization layernorm_zero_centered_gamma apply_residual_connection_post_layernorm gated_linear_unit "
        "activation_func_clamp_value glu_linear_offset add_bias_linear use_mup is_hybrid_model "
        "heterogeneous_block_specs mtp_enabled",
        FIXED_ARCHITECTURE,
    ),
    *requires_default("qk_clip", "queries and keys are normalized after the projection, so that it has no effect"),
    *requires_default(
        "hierarchical_context_parallel_sizes hybrid_context_parallel tensor_parallel_num_weight_shards "
        "gtp_weight_remat_size",
        "the model supports only tensor, pipeline, context and expert parallelism",
    ),
    *requires_default(
        "num_microbatches_with_partial_activation_checkpoints", "qwen3vl_bridge.forward_step does not support it"
    ),
    *requires_default("use_ring_exchange_p2p", "torch has no ring exchange"),
    *requires_default("use_hf_vision_model", "only this package's vision tower is supported"),
)

# Switch -> settings that have an effect only if the switch is on.
DEPENDENTS = requires_default_while_off(
    {
        "cuda_graph_impl": "cuda_graph_warmup_steps cuda_graph_use_single_mempool cuda_graph_retain_backward_graph "
        "delay_offload_until_cuda_graph",
        "cpu_offloading": "cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
        "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers",
        "fine_grained_activation_offloading": "offload_modules min_offloaded_tensor_size activation_offload_fraction "
        "delta_offload_bytes_across_pp_ranks fine_grained_offloading_max_inflight_offloads",
        "moe_paged_stash": "moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda "
        "moe_paged_stash_buffer_size_factor_cpu",
        "qk_clip": "qk_clip_alpha qk_clip_threshold",
        "dist_train.use_dist_train": "vision_world_size language_world_size vision_tensor_model_parallel_size "
        "vision_pipeline_model_parallel_size vision_context_parallel_size vision_expert_tensor_parallel_size "
        "vision_expert_model_parallel_size vision_to_llm_dp_ratio",
        "overlap_moe_expert_parallel_comm": "high_priority_a2a_comm_stream",
        "tp_comm_overlap": "tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
        "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_overlap_cfg",
    }
)

# --- Before megatron-core completes the fields ---


def _recompute_checks(prefix: str) -> tuple[Check, ...]:
    """Return checks for recomputation in the text model (prefix "") or the vision tower ("vision_")."""
    granularity = f"{prefix}recompute_granularity"
    without_norms = ("core_attn",) if prefix else ("core_attn", "mlp", "moe", "moe_act", "shared_experts")
    unused = {None: "method num_layers modules", "full": "modules", "selective": "method num_layers"}
    return (
        Requires(granularity, one_of(*unused)),
        Requires(f"{prefix}recompute_method", one_of("uniform", "block"), equals(granularity, "full")),
        Requires(f"{prefix}recompute_num_layers", at_least(1), equals(granularity, "full")),
        *(  # ["core_attn"] is megatron-core's default
            Requires(f"{prefix}recompute_{name}", None, equals(granularity, value), (0, [], ["core_attn"]), IGNORED)
            for value, names in unused.items()
            for name in names.split()
        ),
        # To recompute a norm, megatron-core calls Transformer Engine.
        Requires(
            f"{prefix}recompute_modules", one_of(None, *without_norms), _LOCAL,
            why="recomputing 'gdn_norm_out' or 'layernorm' needs Transformer Engine",
        ),
    )  # fmt: skip


def _check_recomputed_modules(provider: VisionLanguageFields) -> None:
    """Raise ValueError if `recompute_modules` names modules that the text model lacks. megatron-core ignores these."""
    moe_layers = len(provider.moe_layers)
    present = {
        "mlp": moe_layers < provider.num_layers,
        "moe": moe_layers,
        "moe_act": moe_layers,
        "shared_experts": moe_layers and provider.moe_shared_expert_intermediate_size,
    }
    absent = [name for name in provider.recompute_modules or () if not present.get(name, True)]
    if provider.recompute_granularity == "selective" and absent:
        raise ValueError(f"recompute_modules has {absent}, which this model does not have; remove them")


def _check_offloaded_modules(provider: VisionLanguageFields) -> None:
    """Raise ValueError if `offload_modules` names modules without activations to offload.

    These are modules that the model lacks, and norms that Transformer Engine fuses with a projection.
    """
    present = {"core_attn", "attn_proj", "qkv_linear"}
    if provider.moe_layers:
        present |= {"mlp_norm", "expert_fc1", "moe_act"}
    if provider.fine_grained_activation_offloading and (absent := set(provider.offload_modules or ()) - present):
        raise ValueError(
            f"offload_modules has {sorted(absent)}, for which this model has no activations to offload: use only "
            f"{', '.join(sorted(present))}"
        )


def _check_recomputed_deepstack(provider: VisionLanguageFields) -> None:
    """Raise ValueError if a DeepStack layer is not the last layer of a recomputed chunk of layers.

    megatron-core recomputes chunks of layers. It returns the hidden states of a chunk's last layer, and silently loses
    the hidden states of the chunk's other layers, which DeepStack needs.
    """
    if (provider.vision_recompute_granularity, provider.vision_recompute_method) != ("full", "uniform"):
        return
    chunk = provider.vision_recompute_num_layers
    if lost := [layer for layer in provider.deepstack_layers if (layer + 1) % chunk]:
        raise ValueError(
            f"vision_recompute_num_layers is {chunk}: the DeepStack layers {lost} are not the last of a chunk of "
            f"{chunk} layers, and their features would be lost; set it to 1"
        )


# To overlap the expert all-to-all with compute, megatron-core's combined schedule runs parts of layers as nodes. These
# settings would be skipped by that schedule, or are not tested with it.
_OVERLAP, _DELAYED = is_on("overlap_moe_expert_parallel_comm"), is_on("delay_wgrad_compute")
_COMBINED_SCHEDULE: tuple[Check, ...] = (
    *requires_default(
        "cpu_offloading fine_grained_activation_offloading moe_paged_stash",
        "it starts in the decoder's forward pass, which the combined 1F1B schedule does not call",
        _OVERLAP,
    ),
    *requires_default("mlp_chunks_for_training", "the combined 1F1B schedule ignores it", _OVERLAP),
    Requires(
        "moe_token_dispatcher_type", "alltoall", _OVERLAP,
        why="no other dispatcher has been compared with training without overlap",
    ),
    *requires_default(
        "fp8 fp4",
        "the inputs of experts are freed before the backward pass, which is not tested with FP8 or FP4",
        _OVERLAP,
        also=(False, ""),
    ),
    *requires_default(
        "overlap_moe_expert_parallel_comm", "the schedule for separate vision ranks does not support it", _DIST_TRAIN
    ),
    Requires("transformer_impl", "transformer_engine", _DELAYED, why="local layers cannot delay weight gradients"),
    Requires("freeze_language_model", False, _DELAYED, why="frozen layers have no weight gradients to delay"),
    Requires(
        "trains_mtp", False, _DELAYED,
        why="the layer for multi-token prediction would not get its delayed gradients; or set "
        "mtp_loss_scaling_factor=0",
    ),
)  # fmt: skip

_NO_GRAPHS = (
    "rows, images and positions differ between batches; a replayed CUDA graph would add no DeepStack features and "
    "would treat padding as tokens"
)
# A run checks these settings before Megatron-Bridge validates the configuration, because that clears some of them.
CUDA_GRAPHS: tuple[Requires, ...] = (
    *requires_default(
        "cuda_graph_impl enable_cuda_graph external_cuda_graph vision_cuda_graph_impl vision_cuda_graph_scope "
        "max_vision_cuda_graph_seq_length",
        _NO_GRAPHS,
        also=(None,),
    ),
    # Megatron-Bridge's recipes set "full", its default, although graphs are off.
    *(Requires(f"cuda_graph_{name}", [], None, (None, "full", ""), _NO_GRAPHS) for name in ("modules", "scope")),
)

BEFORE_FINALIZE: tuple[Check, ...] = (
    check_provider_names,
    *FIXED,
    Requires(
        "dist_train.use_dist_train", False, is_off("vision_module_class"),
        why="this family does not support separate vision ranks",
    ),
    lambda model: check_tower_size(model.vision_config.to_dict(), model.hidden_size),
    lambda model: fields.vision_activation(model.vision_config.hidden_act),
    lambda model: fields.activation_name(model.activation_func),
    *_recompute_checks(""),
    *_recompute_checks("vision_"),
    *requires_default(
        "distribute_saved_activations", IGNORED, differs("recompute_granularity", "full"), also=(None,)
    ),
    # Not "mlp": the tower's MLPs have a bias. megatron-core 0.19 returns the bias of a recomputed MLP from its autograd
    # function, and the backward pass then recurses without end. Other modules do not exist in the tower.
    Requires("vision_recompute_modules", one_of(None, "core_attn", "layernorm")),
    _check_recomputed_modules,
    _check_offloaded_modules,
    _check_recomputed_deepstack,
    *CUDA_GRAPHS,
    *_COMBINED_SCHEDULE,
    Requires("loss_chunk_tokens", at_least(0)),
    Requires(
        "defer_embedding_wgrad_compute", False, is_on("loss_chunk_tokens"),
        why="the output layer would save its input twice, because the logits of chunks are recomputed; or set "
        "loss_chunk_tokens=0",
    ),
    *requires_default("fp8 fp4", IGNORED, _LOCAL, also=(False, "")),
    *requires_default("cpu_offloading", "it needs Transformer Engine", _LOCAL),
    *requires_default(
        "apply_query_key_layer_scaling batch_invariant_mode log_max_attention_logit",
        "only Transformer Engine's attention supports it",
        _LOCAL,
    ),
    *requires_default(
        "fp32_residual_connection",
        "local norms and linear layers need inputs in the dtype of their weights",
        _LOCAL & differs("params_dtype", torch.float32),
    ),
    Requires(
        "attention_backend", one_of(*(backend for backend in AttnBackend if backend is not AttnBackend.local)),
        _NOT_LOCAL, why="Transformer Engine's layers have no local attention; or set transformer_impl='local'",
    ),
    *DEPENDENTS,
)  # fmt: skip

# Checks of a provider without experts.
DENSE: tuple[Check, ...] = requires_default("num_moe_experts", "a model with experts needs the family's MoE provider")

# Checks of a provider with experts.
MOE: tuple[Check, ...] = (
    # Source: transformers, Qwen3VLMoeTextTopKRouter, Qwen3_5MoeTopKRouter.
    *requires_default(
        "moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups "
        "moe_router_topk_limited_devices moe_router_enable_expert_bias moe_router_force_biased",
        "routing weights are a softmax over all experts, normalized over the selected experts",
    ),
    *requires_default(
        "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size moe_latent_size", FIXED_ARCHITECTURE
    ),
    *requires_default(
        "moe_expert_capacity_factor moe_token_dropping moe_expert_rank_capacity_factor",
        "an expert at its capacity would drop tokens, and padding could displace tokens",
    ),
    *requires_default("moe_input_jitter_eps", "megatron-core adds this noise during evaluation too"),
    *requires_default(
        "expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size",
        "experts are sharded only by expert_model_parallel_size and expert_tensor_parallel_size",
    ),
    Requires(
        "moe_flex_dispatcher_backend", one_of("deepep", "hybridep"), equals("moe_token_dispatcher_type", "flex"),
        why="others are not tested; or set moe_token_dispatcher_type='alltoall'",
    ),
    Requires(
        "moe_router_load_balancing_type", one_of("aux_loss", "global_aux_loss", "none"),
        why="other types balance over the tokens of a row, so that padding or packing would change training",
    ),
    Requires(
        "moe_router_force_load_balancing", False, is_off("allow_random_routing"),
        why="tokens would be routed at random, and training would ruin the weights. To measure speed, set "
        "allow_random_routing too",
    ),
    *(
        Requires(name, False, _LOCAL, why="it needs Transformer Engine")
        for name in ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
    ),
    Requires(
        "moe_router_fusion", False, equals("moe_router_dtype", "fp64"),
        why="the fused router computes only in 'fp32'",
    ),
)  # fmt: skip

# --- After megatron-core has completed the fields ---


def _check_divisible(provider: VisionLanguageFields) -> None:
    """Raise ValueError if a dimension of the model, or the length of a row, cannot be divided over the parallel ranks.

    Also raise it if `expert_tensor_parallel_size` is set for a model without experts, unless it is the
    tensor-parallel size.
    """
    names = {
        "tp": _TP,
        "tp of vision": _VISION_TP if provider.dist_train.use_dist_train else _TP,
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "tp * cp": f"{_TP} * {_CP}",
        "ep * etp": "expert_model_parallel_size * expert_tensor_parallel_size",
    }
    wrong = indivisible_sizes(
        provider.dimensions().with_vocab(provider.padded_vocab_size),
        tp=provider.tensor_model_parallel_size,
        cp=provider.context_parallel_size,
        ep=provider.expert_model_parallel_size,
        etp=provider.expert_tensor_parallel_size or 1,
        vision_tp=fields.vision_tp_size(provider),
        linear_mode=getattr(provider, "linear_cp_mode", None),
    )
    for setting, size, parallelism, ranks, divisor_allowed in wrong:
        condition = _DIST_TRAIN.describe(provider) if names[parallelism] == _VISION_TP else ""
        advice = "; set should_pad_vocab" if setting == "padded_vocab_size" else ""
        if setting.startswith("linear_num") and size % provider.tensor_model_parallel_size == 0:
            advice = "; or set linear_cp_mode='chunkwise'"
        multiple = "a multiple or divisor" if divisor_allowed else "a multiple"
        raise ValueError(
            f"{setting} is {size}{condition}, expected {multiple} of {names[parallelism]}, {ranks}{advice}"
        )
    if not provider.moe_layers and (ranks := provider.expert_tensor_parallel_size) not in (
        1,
        provider.tensor_model_parallel_size,
    ):
        raise ValueError(f"expert_tensor_parallel_size is {ranks}, expected None: this model has no experts")
    sequence_ranks, multiple = fields.sequence_parallel_size(provider), fields.token_multiple(provider)
    check_row_length(provider.seq_length, provider.context_parallel_size, sequence_ranks, multiple)


def _check_quantized_sizes(provider: VisionLanguageFields) -> None:
    """Raise ValueError if a rank's shard of a linear layer has dimensions that FP8 or FP4 GEMMs do not support."""
    if (multiple := fields.token_multiple(provider)) == 1:
        return
    wrong = misaligned_dims(
        registry.family(provider.family).rows(),
        provider.dimensions(),
        tp=provider.tensor_model_parallel_size,
        etp=provider.expert_tensor_parallel_size or 1,
        multiple=multiple,
        exempt=provider.layers_in_16_bits,
    )
    for layer, side, size, ranks in wrong:
        smaller = [n for n in range(1, ranks) if ranks % n == 0 and size % (n * multiple) == 0]
        advice = f"a multiple of {multiple}" + (f", as on {smaller[-1]} ranks" if smaller else "")
        if layer.endswith(".in_proj"):
            advice += "; or set linear_attention_in_proj_bf16=True"
        raise ValueError(
            f"{layer} has {size} {side}, {size / ranks:g} on each of {ranks} tensor-parallel ranks, expected {advice}: "
            f"{_describe_precision(provider)} needs that for its matrix products"
        )


def _describe_precision(provider: VisionLanguageFields) -> str:
    name = "fp8" if provider.fp8 else "fp4"
    recipe = getattr(provider, f"{name}_recipe")
    return f"{name} with {name}_recipe {getattr(recipe, 'value', recipe)!r}"


def check_token_count(provider: VisionLanguageFields, tokens: int) -> None:
    """Raise ValueError if FP8 or FP4 GEMMs do not support `tokens`, the number of tokens on a context-parallel rank."""
    if tokens % (multiple := fields.sequence_parallel_size(provider) * fields.token_multiple(provider)):
        raise ValueError(
            f"a microbatch has {tokens} tokens on each context-parallel rank, expected a multiple of {multiple} for "
            f"{_describe_precision(provider)}: pad its rows to a multiple of "
            f"{multiple * provider.context_parallel_size}"
        )


def _check_replicas(provider: VisionLanguageFields) -> None:
    """Raise ValueError if vision and language replicas cannot be paired, or if `vision_to_llm_dp_ratio` is wrong."""
    if not provider.dist_train.use_dist_train:
        return
    replicas, ratio = fields.dist_train_replicas(provider), provider.dist_train.vision_to_llm_dp_ratio
    replicas.check(
        ": dist_train.vision_world_size / vision_tensor_model_parallel_size, and language_world_size / "
        "(tensor * pipeline * context parallel size)"
    )
    if ratio not in (None, replicas.ratio):
        raise ValueError(
            f"dist_train.vision_to_llm_dp_ratio is {ratio}, expected None"
            + (f" or {replicas.ratio}" if replicas.ratio else "")
            + f": there are {replicas.vision} vision replicas and {replicas.language} replicas of the language model"
        )


def _check_pipeline_chunks(provider: VisionLanguageFields) -> None:
    """Raise ValueError if `overlap_moe_expert_parallel_comm` is set and a pipeline chunk has no layers.

    The first layer of a chunk unpacks the received tensor. `pipeline_model_parallel_layout` "E|t*24|t*23|tL", for
    example, has a chunk without layers.
    """
    if not provider.overlap_moe_expert_parallel_comm or provider.pipeline_model_parallel_size == 1:
        return
    if (layout := provider.pipeline_model_parallel_layout) is not None:
        layers = [chunk.count(LayerType.decoder) for stage in layout.layout for chunk in stage]
    else:
        chunks = range(provider.virtual_pipeline_model_parallel_size)
        stages = range(provider.pipeline_model_parallel_size)
        layers = [get_num_layers_to_build(provider, chunk, stage) for stage in stages for chunk in chunks]
    if 0 in layers:
        raise ValueError(
            f"overlap_moe_expert_parallel_comm is True and the pipeline chunks have {layers} layers, expected at least "
            "one layer in each chunk"
        )


_UNEVEN = (
    *("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)

# Checks of the numbers of ranks of both modules. `check_world` runs them too, before the provider is finalized.
_DIST_TRAIN_SIZES: tuple[Check, ...] = (
    Requires(_VISION_RANKS, at_least(1), _DIST_TRAIN),
    Requires(_LANGUAGE_RANKS, at_least(1), _DIST_TRAIN),
    Requires(_VISION_TP, at_least(1), _DIST_TRAIN, also=(None,)),
    *(
        Requires(
            f"dist_train.vision_{kind}_parallel_size", 1, _DIST_TRAIN, also=(None,),
            why="the tower supports only tensor and data parallelism",
        )
        for kind in ("pipeline_model", "context", "expert_tensor", "expert_model")
    ),
    Requires(_VISION_RANKS, multiple_of(_VISION_TP), _DIST_TRAIN),
    Requires(_LANGUAGE_RANKS, multiple_of(f"{_TP} * {_PP} * {_CP}"), _DIST_TRAIN),
    Requires(
        _LANGUAGE_RANKS, multiple_of(f"expert_tensor_parallel_size * expert_model_parallel_size * {_PP}"),
        lambda model: _DIST_TRAIN(model) and model.moe_layers,
    ),
)  # fmt: skip

AFTER_FINALIZE: tuple[Check, ...] = (
    *requires_default(
        "add_encoder add_decoder",
        "every rank has both the vision tower and the language model",
        is_off("dist_train.use_dist_train"),
    ),
    *_DIST_TRAIN_SIZES,
    _check_divisible,
    _check_quantized_sizes,
    Requires(_VPP, None, equals(_PP, 1), also=(1,), why="a single stage cannot be interleaved"),
    Requires(  # megatron-core checks uneven stages when it builds them
        "num_layers", multiple_of(f"{_PP} * {_VPP}"),
        lambda model: not any(getattr(model, name) not in (None, False) for name in _UNEVEN),
        why="or set uneven stages: pipeline_model_parallel_layout, num_layers_in_first_pipeline_stage and "
        "num_layers_in_last_pipeline_stage, or account_for_embedding_in_pipeline_split and "
        "account_for_loss_in_pipeline_split",
    ),
    Requires(
        "cp_comm_type", one_of(None, "all_gather"), is_above(_CP, 1) & _LOCAL,
        why="local attention gathers keys and values once per layer",
    ),
    Requires(  # "p2p" is the default
        "cp_comm_type", one_of(None, "p2p", "all_gather", "a2a"), is_above(_CP, 1) & _NOT_LOCAL,
        why="packed rows support no other type, and padded rows are computed as packed rows",
    ),
    _check_pipeline_chunks,
    _check_replicas,
    *requires_default(
        _CP, "megatron-core's communicator between modules does not support context parallelism", _DIST_TRAIN
    ),
    *requires_default(
        f"{_VPP} overlap_p2p_comm", "the schedule for separate vision ranks is not interleaved", _DIST_TRAIN
    ),
    *requires_default("fp16", "vision and language ranks would scale losses and skip steps independently", _DIST_TRAIN),
    *requires_default(
        "fp32_residual_connection", "pipeline stages and vision ranks would send different dtypes", _DIST_TRAIN
    ),
    Requires(
        "variable_seq_lengths", True, _DIST_TRAIN,
        why="the size of the tensors that modules send each other depends on the images in a row",
    ),
    Requires(
        "calculate_per_token_loss", True, _DIST_TRAIN,
        why="otherwise each module divides gradients by the number of its own data-parallel ranks",
    ),
    Requires("pipeline_dtype", same_as("params_dtype"), _DIST_TRAIN, (None,), "vision ranks send in this dtype"),
    lambda model: check_mrope_section(model.mrope_section, int(model.kv_channels * model.rotary_percent)),
)  # fmt: skip

# --- Before a forward pass, and for a model that is built for training ---


def _check_float32(provider: VisionLanguageFields) -> None:
    """Raise ValueError for float32 attention that Transformer Engine does not support.

    Fused kernels support only 16 and 8 bits. Unfused attention stores all attention scores, supports packed rows from
    release `PACKED_UNFUSED` on, and does not support context parallelism.
    """
    supported = provider.context_parallel_size == 1 and is_te_min_version(PACKED_UNFUSED)
    if fields.uses_unfused_attention(provider) and not supported:
        raise ValueError(
            "params_dtype is torch.float32 with transformer_impl 'transformer_engine', expected transformer_impl="
            f"'local' or 16 bits: Transformer Engine {get_te_version()} has no attention in float32 for packed rows on "
            f"{provider.context_parallel_size} context-parallel ranks"
        )


ON_FORWARD: tuple[Check, ...] = (_check_float32,)


def _check_sent_tensors(provider: VisionLanguageFields) -> None:
    """Raise ValueError if a pipeline stage expects another dtype or shape than the previous stage sends."""
    if provider.pipeline_model_parallel_size == 1:
        return
    sent = torch.float32 if provider.fp32_residual_connection else provider.params_dtype
    if provider.pipeline_dtype != sent:
        raise ValueError(f"pipeline_dtype is {provider.pipeline_dtype}, expected {sent}, the dtype of a stage's output")
    if provider.variable_seq_lengths:
        return
    features, layout = len(provider.deepstack_layers), provider.pipeline_model_parallel_layout
    if layout is not None:  # get_num_layers_to_build would need the rank, and ranks may not exist yet
        layers = layout.layout[0][0].count(LayerType.decoder)
    else:
        layers = get_num_layers_to_build(provider, 0 if provider.virtual_pipeline_model_parallel_size else None, 0)
    if layers < features:
        raise ValueError(
            f"variable_seq_lengths is False and the first pipeline stage has {layers} layers, expected True, or at "
            f"least {features} layers: DeepStack features are added after the first {features} layers. A stage with "
            "fewer layers sends features on in tensors whose size depends on the images in a row"
        )


def _check_student(provider: VisionLanguageFields) -> None:
    """Raise ValueError for settings that ModelOpt's distillation does not support."""
    if getattr(provider, "teacher", None) is None:
        return
    if provider.padded_vocab_size != provider.vocab_size:
        raise ValueError(
            f"should_pad_vocab pads the vocabulary of {provider.vocab_size} to {provider.padded_vocab_size}, but with "
            "a teacher, padding would get a share of its probability: set should_pad_vocab=False"
        )
    if provider.pipeline_model_parallel_size > 1 and provider.variable_seq_lengths:
        raise ValueError(
            "variable_seq_lengths is True with a teacher and pipeline stages, expected False: ModelOpt needs the "
            "shape of a received tensor to split it"
        )


GATHERED_LOGITS = "a loss on gathered logits gives wrong gradients"

# Checked only for training, because a model that is loaded for export or inference may have the schedule settings of
# the run that saved it. Megatron-Bridge's `comm_overlap` has set `overlap_p2p_comm` and `batch_p2p_comm` before.
MODEL_CAN_TRAIN: tuple[Check, ...] = (
    *ON_FORWARD,
    Requires(
        "cross_entropy_fusion_impl", "native",
        is_on("cross_entropy_loss_fusion") & _LOCAL & not_installed("transformer_engine"),
        why="the other implementation needs Transformer Engine, which is not installed",
    ),
    *requires_default(
        "overlap_p2p_comm", "only an interleaved schedule can overlap it", is_above(_PP, 1) & is_off(_VPP)
    ),
    # With two stages, the previous and the next stage are the same rank. In a batch of sends and receives, a stage
    # would confuse both: no error, but wrong gradients. Sends and receives one after the other would deadlock.
    Requires(
        "overlap_p2p_comm", True, equals(_PP, 2) & is_above(_VPP, 1),
        why="two interleaved stages would confuse the tensors they send each other; set batch_p2p_comm=False as well",
    ),
    _check_sent_tensors,
    _check_student,
    *requires_default("parallel_output", GATHERED_LOGITS, is_above(_TP, 1)),
    *requires_default("tp_comm_overlap", "it has not been compared with training without it"),
)  # fmt: skip

# --- For a number of processes ---


def check_world(provider: VisionLanguageFields, world: int) -> None:
    """Check the number of processes against the parallel sizes. The provider need not be finalized.

    Raises:
        ValueError: the product of the parallel sizes does not divide the number of processes. Or, with separate vision
            ranks, the numbers of vision and language ranks do not add up to the number of processes.
    """
    if (dist_train := provider.dist_train).use_dist_train:
        run_checks(_DIST_TRAIN_SIZES, provider)
        if (ranks := dist_train.vision_world_size + dist_train.language_world_size) != world:
            raise ValueError(
                f"dist_train.vision_world_size {dist_train.vision_world_size} and language_world_size "
                f"{dist_train.language_world_size} add up to {ranks}, expected {world}, the number of processes: each "
                "is either a vision or a language rank"
            )
        return
    run_checks(PARALLEL_SIZES, provider)
    sizes = {kind: getattr(provider, name) for kind, name in (("tensor", _TP), ("pipeline", _PP), ("context", _CP))}
    product = math.prod(sizes.values())
    if world % product:
        written = " * ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"the run has {world} process{'es' if world > 1 else ''}, expected a multiple of {product}, the product of "
            f"the parallel sizes ({written}): use torchrun --nproc_per_node {product}, or change the sizes, such as "
            "model.tensor_model_parallel_size=1 model.sequence_parallel=False"
        )
