"""What a model refuses: every setting of a provider that would be ignored, fail later, or train something else.

Order of the checks: before megatron-core completes a provider in `finalize()` SIZES, EXPERTS or DENSE, the family's
own `rules` and BEFORE_FINALIZE; after it AFTER_FINALIZE; ON_TRAIN when a run is validated, when a model is built for
training, and with ON_FORWARD by its forward. A rule is a row `Allowed(...).because(...)` or `keep(...)`, and a function
only where settings depend on one another. What megatron-core and Megatron-Bridge refuse clearly is not repeated. Which
settings nothing reads was determined by a search of the installed megatron-core and Megatron-Bridge and
of this package for every field's readers, and by recording which fields runs read (docs/settings.md).
"""

from __future__ import annotations

import math

from qwen3vl_bridge import registry
from qwen3vl_bridge.models import settings
from qwen3vl_bridge.models.divisibility import check_row_length, indivisible, misfits
from qwen3vl_bridge.models.hf_config import check_mrope_section, check_tower_size
from qwen3vl_bridge.models.rules import (
    IGNORED,
    Allowed,
    Rule,
    above,
    any_of,
    at_least,
    check,
    check_provider_names,
    dependents,
    equal,
    is_off,
    is_on,
    keep,
    missing,
    multiple_of,
    not_equal,
    same_as,
)
from qwen3vl_bridge.models.settings import VisionLanguageFields

import torch
from megatron.bridge.models.gpt_provider import modelopt_transformer_layer_spec
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.utils import get_te_version, is_te_min_version

_TENSOR, _STAGES, _VIRTUAL, _CONTEXT = (
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
)
_VISION_RANKS, _LANGUAGE_RANKS = "dist_train.vision_world_size", "dist_train.language_world_size"
_VISION_TENSOR = "dist_train.vision_tensor_model_parallel_size"
_DIST_TRAIN = is_on("dist_train.use_dist_train")
_LOCAL, _NOT_LOCAL = equal("transformer_impl", "local"), not_equal("transformer_impl", "local")
# First release of Transformer Engine whose attention supports packed rows (which padded rows and images are here, too):
# in its unfused implementation (used for float32), and for each communication type of context parallelism. Earlier
# releases raise an error.
# Source: transformer_engine/pytorch/attention/dot_product_attention of the releases 2.8 to 2.18.
PACKED_UNFUSED, PACKED_CONTEXT = "2.11", {"a2a": "2.10", "all_gather": "2.18"}

# Parallel sizes are divisors: they come before everything else.
SIZES: tuple[Rule, ...] = tuple(
    Allowed(name, at_least(1), also=(None,))
    for name in (_TENSOR, _STAGES, _VIRTUAL, _CONTEXT, "expert_model_parallel_size", "expert_tensor_parallel_size")
)

# --- Settings that keep the default of the provider's class ---

NOTHING_ELSE = "this model implements nothing else"
_SELECTS = "transformer_impl selects the layers"


def unread(names: str) -> tuple[Allowed, ...]:
    """Rows of settings that nothing reads for a model."""
    return keep(names, "nothing reads it for this model", also=(None,))


# By the part of megatron-core that reads them, which no family's model has.
UNREAD = unread(
    # other position embeddings
    "rope_scaling_factor "
    # the embedding's own scatter over ranks; images are added before
    "scatter_embedding_sequence_parallel clone_scatter_output_in_embedding "
    # other attention
    "window_attn_skip_freq "
    # other layers
    "use_mamba_mem_eff_path mtp_hybrid_override_pattern memory_efficient_layer_norm use_fused_weighted_squared_relu "
    "dense_grouped_gemm use_grouped_gemm_for_dense_mlp "
    # other routers
    "moe_router_quantile_balancing_ema moe_token_drop_policy "
    # the inference engine, and its data
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

FIXED: tuple[Rule, ...] = (
    *UNREAD,
    *keep("transformer_layer_spec", _SELECTS, also=(modelopt_transformer_layer_spec,)),
    *keep("use_transformer_engine_full_layer_spec", _SELECTS),
    *keep(
        "position_embedding_type rotary_interleaved rotary_scaling_factor rope_scaling seq_len_interpolation_factor "
        "no_rope_freq",
        "rotary_base, mrope_section and rope_parameters define the rotary embedding",
    ),
    *keep(
        " ".join(settings.YARN_FIELDS.values()), "only position_embedding_type='yarn' reads it; or set rope_parameters"
    ),
    *keep(
        # attention
        "qk_layernorm qk_l2_norm add_qkv_bias attention_output_gate window_size softmax_scale softmax_type "
        "multi_latent_attention experimental_attention_variant "
        # the rest of a layer
        "normalization layernorm_zero_centered_gamma apply_residual_connection_post_layernorm gated_linear_unit "
        "activation_func_clamp_value glu_linear_offset add_bias_linear use_mup is_hybrid_model "
        "heterogeneous_block_specs mtp_enabled",
        NOTHING_ELSE,
    ),
    *keep("qk_clip", "queries and keys are normalised after their projection: scaling it changes no attention"),
    *keep(
        "hierarchical_context_parallel_sizes hybrid_context_parallel tensor_parallel_num_weight_shards "
        "gtp_weight_remat_size",
        "the model supports only tensor, pipeline, context and expert parallelism; with others, ranks would see the "
        "wrong tokens",
    ),
    *keep(
        "num_microbatches_with_partial_activation_checkpoints",
        "it requires a forward step with features that ours lacks",
    ),
    *keep("use_ring_exchange_p2p", "torch has no ring exchange"),
    *keep("use_hf_vision_model", "the vision tower is the one of this package"),
)

# Settings of something that another setting turns on.
DEPENDENTS = dependents(
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


def _recompute_of(prefix: str) -> tuple[Rule, ...]:
    """Rules of recomputation in the text model ("") or the vision tower ("vision_")."""
    granularity = f"{prefix}recompute_granularity"
    without_norms = ("core_attn",) if prefix else ("core_attn", "mlp", "moe", "moe_act", "shared_experts")
    unused = {None: "method num_layers modules", "full": "modules", "selective": "method num_layers"}
    return (
        Allowed(granularity, any_of(*unused)),
        Allowed(f"{prefix}recompute_method", any_of("uniform", "block"), equal(granularity, "full")),
        Allowed(f"{prefix}recompute_num_layers", at_least(1), equal(granularity, "full")),
        *(  # ["core_attn"] is megatron-core's default
            Allowed(f"{prefix}recompute_{name}", None, equal(granularity, value), also=(0, [], ["core_attn"])).because(
                IGNORED
            )
            for value, names in unused.items()
            for name in names.split()
        ),
        # megatron-core's recomputation of a norm uses its default for 8-bit training, and calls Transformer Engine.
        Allowed(f"{prefix}recompute_modules", any_of(None, *without_norms), _LOCAL).because(
            "recomputing 'gdn_norm_out' or 'layernorm' needs Transformer Engine"
        ),
    )


def _check_recomputed_modules(provider: VisionLanguageFields) -> None:
    """Refuse modules of layers that the text model does not have, which megatron-core skips silently."""
    experts = len(provider.moe_layers)
    present = {
        "mlp": experts < provider.num_layers,
        "moe": experts,
        "moe_act": experts,
        "shared_experts": experts and provider.moe_shared_expert_intermediate_size,
    }
    if provider.recompute_granularity == "selective" and (
        idle := [name for name in provider.recompute_modules or () if not present.get(name, True)]
    ):
        raise ValueError(f"recompute_modules has {idle}, which this model does not have: expected it without")


def _check_offloaded_modules(provider: VisionLanguageFields) -> None:
    """Refuse modules that keep nothing on the host: those the model does not have, and norms that Transformer Engine
    computes in the next projection.
    """
    present = {"core_attn", "attn_proj", "qkv_linear"}
    if provider.moe_layers:
        present |= {"mlp_norm", "expert_fc1", "moe_act"}
    if provider.fine_grained_activation_offloading and (idle := set(provider.offload_modules or ()) - present):
        raise ValueError(
            f"offload_modules has {sorted(idle)}, of which this model has no activations to offload: expected some of "
            f"{sorted(present)}"
        )


def _check_recomputed_deepstack(provider: VisionLanguageFields) -> None:
    """Refuse DeepStack layers inside a recomputed chunk: megatron-core keeps a layer's output only at the chunk's end,
    silently.
    """
    if (provider.vision_recompute_granularity, provider.vision_recompute_method) != ("full", "uniform"):
        return
    chunk = provider.vision_recompute_num_layers
    if lost := [layer for layer in provider.deepstack_layers if (layer + 1) % chunk]:
        raise ValueError(
            f"vision_recompute_num_layers is {chunk}; DeepStack taps {lost} are not at the end of a chunk of {chunk} "
            "layers and would be lost; use 1"
        )


# What megatron-core's combined schedule, of nodes of a layer, would leave out, or what is not proven with it.
_OVERLAP, _DELAYED = is_on("overlap_moe_expert_parallel_comm"), is_on("delay_wgrad_compute")
_NODES: tuple[Rule, ...] = (
    *keep(
        "cpu_offloading fine_grained_activation_offloading moe_paged_stash",
        "a whole forward pass of the decoder begins it, and the schedule runs only the nodes of layers",
        _OVERLAP,
    ),
    *keep("mlp_chunks_for_training", "the nodes of a layer with experts do not read it", _OVERLAP),
    Allowed("moe_token_dispatcher_type", "alltoall", _OVERLAP).because(
        "gradients are proven to be those of the plain schedule only for it"
    ),
    *keep(
        "fp8 fp4",
        "experts' inputs are freed before the backward pass, which no test has shown to be right in 8 bits",
        _OVERLAP,
        also=(False, ""),
    ),
    *keep("overlap_moe_expert_parallel_comm", "the schedule of two modules has no combined steps", _DIST_TRAIN),
    Allowed("transformer_impl", "transformer_engine", _DELAYED).because("only its layers delay gradients of weights"),
    Allowed("freeze_language_model", False, _DELAYED).because("no gradients of weights are left to delay"),
    Allowed("trains_mtp", False, _DELAYED).because(
        "its layer is no node, and nothing would compute its delayed gradients; or set mtp_loss_scaling_factor=0"
    ),
)


_CAPTURED = (
    "rows, images and their positions differ between batches; a replayed layer would add no DeepStack features and "
    "treat padding as tokens"
)
# Checked for a run before Megatron-Bridge validates its configuration, which clears what is to be captured.
GRAPHS: tuple[Allowed, ...] = (
    *keep(
        "cuda_graph_impl enable_cuda_graph external_cuda_graph vision_cuda_graph_impl vision_cuda_graph_scope "
        "max_vision_cuda_graph_seq_length",
        _CAPTURED,
        also=(None,),
    ),
    # Megatron-Bridge's recipes set "full", its default, for graphs that are off.
    *(Allowed(f"cuda_graph_{name}", [], also=(None, "full", "")).because(_CAPTURED) for name in ("modules", "scope")),
)

BEFORE_FINALIZE: tuple[Rule, ...] = (
    check_provider_names,
    *FIXED,
    Allowed("dist_train.use_dist_train", False, is_off("vision_module_class")).because(
        "this family cannot be split into vision and language modules"
    ),
    lambda model: check_tower_size(model.vision_config.to_dict(), model.hidden_size),
    lambda model: settings.vision_activation(model.vision_config.hidden_act),
    lambda model: settings.name_of_activation(model.activation_func),
    *_recompute_of(""),
    *_recompute_of("vision_"),
    *keep("distribute_saved_activations", IGNORED, not_equal("recompute_granularity", "full"), also=(None,)),
    # Not "mlp": megatron-core 0.19 returns a recomputed MLP's bias, which the tower's MLPs have, from its autograd
    # function, and the backward pass then recurses without end. The rest is for experts or another kind of attention.
    Allowed("vision_recompute_modules", any_of(None, "core_attn", "layernorm")),
    _check_recomputed_modules,
    _check_offloaded_modules,
    _check_recomputed_deepstack,
    *GRAPHS,
    *_NODES,
    Allowed("loss_chunk_tokens", at_least(0)),
    Allowed("defer_embedding_wgrad_compute", False, is_on("loss_chunk_tokens")).because(
        "the output layer would save its input again when the logits of chunks are recomputed; or set "
        "loss_chunk_tokens=0"
    ),
    *keep("fp8 fp4", IGNORED, _LOCAL, also=(False, "")),
    *keep("cpu_offloading", "Transformer Engine provides it", _LOCAL),
    *keep(
        "apply_query_key_layer_scaling batch_invariant_mode log_max_attention_logit",
        "only Transformer Engine's attention does it",
        _LOCAL,
    ),
    *keep(
        "fp32_residual_connection",
        "its norms leave the dtype as it is, and its linear layers accept only that of their weights",
        _LOCAL & not_equal("params_dtype", torch.float32),
    ),
    Allowed(
        "attention_backend",
        any_of(*(backend for backend in AttnBackend if backend is not AttnBackend.local)),
        _NOT_LOCAL,
    ).because("Transformer Engine's layers have no attention for it; or use transformer_impl='local'"),
    *DEPENDENTS,
)

# In addition, only for a provider without experts.
DENSE: tuple[Rule, ...] = keep("num_moe_experts", "a model with experts has the provider of such models")


def _check_expert_numbers(provider: VisionLanguageFields) -> None:
    if not provider.num_moe_experts or not provider.moe_layers:
        raise ValueError(
            f"num_moe_experts is {provider.num_moe_experts}, moe_layer_freq {provider.moe_layer_freq}: expected "
            "experts in at least one layer; a dense model has the dense provider"
        )
    if not 0 < provider.moe_router_topk <= provider.num_moe_experts:
        raise ValueError(f"moe_router_topk is {provider.moe_router_topk}, expected 1 to {provider.num_moe_experts}")


# In addition, only for a provider with experts.
EXPERTS: tuple[Rule, ...] = (
    _check_expert_numbers,
    # Source: transformers, Qwen3VLMoeTextTopKRouter, Qwen3_5MoeTopKRouter.
    *keep(
        "moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups "
        "moe_router_topk_limited_devices moe_router_enable_expert_bias moe_router_force_biased",
        "routing weights are a softmax over all experts, renormalised over the selected ones",
    ),
    *keep("moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size moe_latent_size", NOTHING_ELSE),
    *keep(
        "moe_expert_capacity_factor moe_token_dropping moe_expert_rank_capacity_factor",
        "a full expert would drop tokens, and padding could displace real ones",
    ),
    *keep("moe_input_jitter_eps", "megatron-core adds this noise during evaluation too"),
    *keep(
        "expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size",
        "experts are split only by expert_model_parallel_size and expert_tensor_parallel_size",
    ),
    Allowed(
        "moe_flex_dispatcher_backend", any_of("deepep", "hybridep"), equal("moe_token_dispatcher_type", "flex")
    ).because("no other has been compared with a run without it; or moe_token_dispatcher_type='alltoall'"),
    Allowed("moe_router_load_balancing_type", any_of("aux_loss", "global_aux_loss", "none")).because(
        "other types balance over the tokens of a row, so padding or packing would change the training of real tokens"
    ),
    Allowed("moe_router_force_load_balancing", False, is_off("allow_random_routing")).because(
        "tokens would be routed at random, and training would ruin the weights. For speed measurements, set "
        "allow_random_routing too"
    ),
    *(
        Allowed(name, False, _LOCAL).because("Transformer Engine provides it")
        for name in ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
    ),
    Allowed("moe_router_fusion", False, equal("moe_router_dtype", "fp64")).because(
        "the fused router computes only in 'fp32'"
    ),
)

# --- For a provider whose fields megatron-core has completed ---


def _check_divisible(provider: VisionLanguageFields) -> None:
    names = {
        "tp": _TENSOR,
        "tp of vision": _VISION_TENSOR if provider.dist_train.use_dist_train else _TENSOR,
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "tp * cp": f"{_TENSOR} * {_CONTEXT}",
    }
    wrong = indivisible(
        provider.dimensions().with_vocab(provider.padded_vocab_size),
        tp=provider.tensor_model_parallel_size,
        cp=provider.context_parallel_size,
        ep=provider.expert_model_parallel_size,
        etp=provider.expert_tensor_parallel_size or 1,
        vision_tp=settings.vision_tensor_ranks(provider),
    )
    for setting, size, split, ranks, either in wrong:
        circumstances = _DIST_TRAIN.describe(provider) if names[split] == _VISION_TENSOR else ""
        why = ": should_pad_vocab pads it" if setting == "padded_vocab_size" else ""
        multiple = "a multiple or divisor" if either else "a multiple"
        raise ValueError(f"{setting} is {size}{circumstances}, expected {multiple} of {names[split]}, {ranks}{why}")
    if not provider.moe_layers and (ranks := provider.expert_tensor_parallel_size) not in (
        1,
        provider.tensor_model_parallel_size,
    ):
        raise ValueError(f"expert_tensor_parallel_size is {ranks}, expected None: this model has no experts")
    sequence, each = settings.sequence_ranks(provider), settings.token_multiple(provider)
    check_row_length(provider.seq_length, provider.context_parallel_size, sequence, each)


def _check_quantised_sizes(provider: VisionLanguageFields) -> None:
    """Refuse tensor-parallel parts of layers whose products Transformer Engine does not compute in 8 or 4 bits."""
    multiple, tensor = settings.token_multiple(provider), provider.tensor_model_parallel_size
    if multiple == 1:
        return
    sizes = dict(etp=provider.expert_tensor_parallel_size or 1, multiple=multiple, exempt=provider.layers_in_16_bits)
    rows, dims = registry.family(provider.family).rows(), provider.dimensions()
    for layer, side, size, ranks in misfits(rows, dims, tp=tensor, **sizes):
        smaller = [n for n in range(1, ranks) if ranks % n == 0 and size % (n * multiple) == 0]
        advice = f"a multiple of {multiple}" + (f", as on {smaller[-1]} ranks" if smaller else "")
        if layer.endswith(".in_proj"):
            advice += "; or linear_attention_in_proj_bf16=True"
        raise ValueError(
            f"{layer} has {size} {side}, {size / ranks:g} on each of {ranks} tensor-parallel ranks, expected {advice}: "
            f"with {_bits(provider)} products take nothing else"
        )


def _bits(provider: VisionLanguageFields) -> str:
    name = "fp8" if provider.fp8 else "fp4"
    recipe = getattr(provider, f"{name}_recipe")
    return f"{name} and {name}_recipe {getattr(recipe, 'value', recipe)!r}"


def check_token_count(provider: VisionLanguageFields, tokens: int) -> None:
    """Refuse (ValueError) a microbatch whose `tokens` on a context-parallel rank 8- or 4-bit products do not take."""
    if tokens % (multiple := settings.sequence_ranks(provider) * settings.token_multiple(provider)):
        raise ValueError(
            f"a microbatch has {tokens} tokens on each context-parallel rank, expected a multiple of {multiple} with "
            f"{_bits(provider)}: pad its rows to a multiple of {multiple * provider.context_parallel_size}"
        )


def _check_context_kernels(provider: VisionLanguageFields) -> None:
    """Check that the context-parallel kernels support packed rows; a single padded row counts as packed here."""
    ranks, tensor, kinds = provider.context_parallel_size, provider.tensor_model_parallel_size, provider.cp_comm_type
    if ranks == 1 or provider.transformer_impl == "local":
        return
    kinds = set(kinds) if isinstance(kinds, list) else {kinds}
    for kind, release in PACKED_CONTEXT.items():
        if kind in kinds and not is_te_min_version(release):
            raise ValueError(
                f"cp_comm_type {kind!r} supports packed rows from Transformer Engine {release} on, and "
                f"{get_te_version()} is installed: expected 'p2p', or a later version"
            )
    groups = max(provider.num_query_groups // tensor, 1)
    if "a2a" in kinds and (groups % ranks or provider.num_attention_heads // tensor % ranks):
        raise ValueError(
            f"cp_comm_type 'a2a' divides heads over context_parallel_size {ranks}, expected a divisor of "
            f"{groups}, the query groups of each tensor-parallel rank; or use 'p2p'"
        )


def _check_replicas(provider: VisionLanguageFields) -> None:
    if not provider.dist_train.use_dist_train:
        return
    replicas, ratio = settings.replicas_of(provider), provider.dist_train.vision_to_llm_dp_ratio
    replicas.check(
        ": dist_train.vision_world_size / vision_tensor_model_parallel_size, and language_world_size / "
        "(tensor * pipeline * context parallel size)"
    )
    if ratio not in (None, replicas.ratio):
        raise ValueError(
            f"dist_train.vision_to_llm_dp_ratio is {ratio}, expected None"
            + (f" or {replicas.ratio}" if replicas.ratio else "")
            + f": there are {replicas.vision} replicas of the tower and {replicas.language} of the language model"
        )


def _check_parts(provider: VisionLanguageFields) -> None:
    """Refuse experts' all-to-all under computation with a part of the pipeline that has no layers, whose first one
    unpacks what the part receives.
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
            f"the parts of the pipeline have {layers} layers with overlap_moe_expert_parallel_comm, expected at least "
            "one in each"
        )


_UNEVEN = (
    *("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)

# Numbers of ranks of both modules, for a provider that is finalised or not.
_DIST_TRAIN_SIZES: tuple[Rule, ...] = (
    Allowed(_VISION_RANKS, at_least(1), _DIST_TRAIN),
    Allowed(_LANGUAGE_RANKS, at_least(1), _DIST_TRAIN),
    Allowed(_VISION_TENSOR, at_least(1), _DIST_TRAIN, also=(None,)),
    *(
        Allowed(f"dist_train.vision_{kind}_parallel_size", 1, _DIST_TRAIN, also=(None,)).because(
            "the tower is one stage without experts, and its data-parallel ranks divide the images"
        )
        for kind in ("pipeline_model", "context", "expert_tensor", "expert_model")
    ),
    Allowed(_VISION_RANKS, multiple_of(_VISION_TENSOR), _DIST_TRAIN),
    Allowed(_LANGUAGE_RANKS, multiple_of(f"{_TENSOR} * {_STAGES} * {_CONTEXT}"), _DIST_TRAIN),
    Allowed(
        _LANGUAGE_RANKS,
        multiple_of(f"expert_tensor_parallel_size * expert_model_parallel_size * {_STAGES}"),
        lambda model: _DIST_TRAIN(model) and model.moe_layers,
    ),
)

AFTER_FINALIZE: tuple[Rule, ...] = (
    *keep("add_encoder add_decoder", "every rank has both modules", is_off("dist_train.use_dist_train")),
    *_DIST_TRAIN_SIZES,
    _check_divisible,
    _check_quantised_sizes,
    Allowed(_VIRTUAL, None, equal(_STAGES, 1), also=(1,)).because("there are no stages to interleave"),
    Allowed(  # megatron-core checks uneven stages while it builds them
        "num_layers",
        multiple_of(f"{_STAGES} * {_VIRTUAL}"),
        lambda model: not any(getattr(model, name) not in (None, False) for name in _UNEVEN),
    ).because(
        "or uneven stages: set pipeline_model_parallel_layout, num_layers_in_first_pipeline_stage and "
        "num_layers_in_last_pipeline_stage, or account_for_embedding_in_pipeline_split and "
        "account_for_loss_in_pipeline_split"
    ),
    Allowed("cp_comm_type", any_of(None, "all_gather"), above(_CONTEXT, 1) & _LOCAL).because(
        "keys and values are gathered once a layer"
    ),
    # "p2p" is the default; a single padded row is a packed row here.
    Allowed("cp_comm_type", any_of(None, "p2p", "all_gather", "a2a"), above(_CONTEXT, 1) & _NOT_LOCAL).because(
        "packed rows have no other"
    ),
    _check_parts,
    _check_context_kernels,
    _check_replicas,
    *keep(_CONTEXT, "megatron-core's communicator between modules does not support context parallelism", _DIST_TRAIN),
    *keep(f"{_VIRTUAL} overlap_p2p_comm", "the schedule of two modules is not interleaved", _DIST_TRAIN),
    *keep("fp16", "each module would scale its loss and skip steps independently", _DIST_TRAIN),
    *keep("fp32_residual_connection", "stages would send another dtype than the modules", _DIST_TRAIN),
    Allowed("variable_seq_lengths", True, _DIST_TRAIN).because(
        "the size of what the modules send each other depends on a row's images"
    ),
    Allowed("calculate_per_token_loss", True, _DIST_TRAIN).because(
        "otherwise each module divides gradients by the number of its own data-parallel ranks"
    ),
    Allowed("pipeline_dtype", same_as("params_dtype"), _DIST_TRAIN, also=(None,)).because(
        "the dtype of the tower's output"
    ),
    lambda model: check_mrope_section(model.mrope_section, int(model.kv_channels * model.rotary_percent)),
)

# --- In each forward pass, and in addition for a model that is built to be trained ---


def _check_float32(provider: VisionLanguageFields) -> None:
    """Refuse a forward pass that would fail in Transformer Engine: its fused kernels support only 16 and 8 bits.

    For float32 it uses its unfused implementation, which stores all attention scores, supports packed rows only from
    `PACKED_UNFUSED` on, and does not support context parallelism. Models that are only loaded, exported or saved need
    no attention.
    """
    supported = provider.context_parallel_size == 1 and is_te_min_version(PACKED_UNFUSED)
    if settings.attends_without_kernel(provider) and not supported:
        raise ValueError(
            "params_dtype is torch.float32 with transformer_impl 'transformer_engine', expected transformer_impl="
            f"'local' or 16 bits: Transformer Engine {get_te_version()} has no attention in float32 for packed rows on "
            f"{provider.context_parallel_size} context-parallel ranks"
        )


ON_FORWARD: tuple[Rule, ...] = (_check_float32,)


def _check_stages(provider: VisionLanguageFields) -> None:
    """Refuse a dtype or a size of what pipeline stages send each other that is not that of their output."""
    if provider.pipeline_model_parallel_size == 1:
        return
    sent = torch.float32 if provider.fp32_residual_connection else provider.params_dtype
    if provider.pipeline_dtype != sent:
        raise ValueError(
            f"pipeline_dtype is {provider.pipeline_dtype}, expected {sent}, the dtype of the stages' output"
        )
    if provider.variable_seq_lengths:
        return
    features, layout = len(provider.deepstack_layers), provider.pipeline_model_parallel_layout
    if layout is not None:  # megatron-core would need the rank, and there may be no ranks yet
        layers = layout.layout[0][0].count(LayerType.decoder)
    else:
        layers = get_num_layers_to_build(provider, 0 if provider.virtual_pipeline_model_parallel_size else None, 0)
    if layers < features:
        raise ValueError(
            f"variable_seq_lengths is False and the first pipeline stage has {layers} layers, expected True, or at "
            f"least {features} layers: DeepStack features are added after the first {features}, and the size of what "
            "stages send each other depends on a row's images"
        )


def _check_student(provider: VisionLanguageFields) -> None:
    """Refuse what ModelOpt's distillation gets wrong or cannot do."""
    if getattr(provider, "teacher", None) is None:
        return
    if provider.padded_vocab_size != provider.vocab_size:
        raise ValueError(
            f"should_pad_vocab pads the vocabulary of {provider.vocab_size} to {provider.padded_vocab_size}, expected "
            "no padding with a teacher: rows that are no tokens would get a share of its probability"
        )
    if provider.pipeline_model_parallel_size > 1 and provider.variable_seq_lengths:
        raise ValueError(
            "variable_seq_lengths is True with a teacher and pipeline stages, expected False: ModelOpt splits what "
            "stages send by its shape, which must be known"
        )


LOGITS = "a loss on gathered logits gives wrong gradients"

# A model that is loaded for export or inference may carry settings of schedules from the run that saved it.
# Megatron-Bridge's `comm_overlap` writes `overlap_p2p_comm` and `batch_p2p_comm` before it finalises the model.
ON_TRAIN: tuple[Rule, ...] = (
    *ON_FORWARD,
    Allowed(
        "cross_entropy_fusion_impl",
        "native",
        is_on("cross_entropy_loss_fusion") & _LOCAL & missing("transformer_engine"),
    ).because("the other is Transformer Engine's, which is not installed"),
    *keep("overlap_p2p_comm", "the schedule has nothing to overlap", above(_STAGES, 1) & is_off(_VIRTUAL)),
    # Each of two stages is both the previous and the next of the other. In a batch, a stage would confuse what it
    # receives from the previous with what it receives from the next, and nothing fails: the gradients are wrong. One by
    # one, they would deadlock.
    Allowed("overlap_p2p_comm", True, equal(_STAGES, 2) & above(_VIRTUAL, 1)).because(
        "two interleaved stages would confuse the tensors they send each other; batch_p2p_comm must be False as well"
    ),
    Allowed("batch_p2p_comm", False, is_on("overlap_p2p_comm") & above(_STAGES, 1)).because(
        "the schedule supports only one of the two"
    ),
    Allowed("microbatch_group_size_per_vp_stage", at_least(_STAGES), is_on(_VIRTUAL), also=(None,)),
    _check_stages,
    _check_student,
    *keep("parallel_output", LOGITS, above(_TENSOR, 1)),
    *keep(
        "tp_comm_overlap",
        "its buffers are memory that GPUs share, and no run with them has been compared with one without",
    ),
)

# --- For a number of processes, and of microbatches ---


def check_world(provider: VisionLanguageFields, world: int) -> None:
    """Refuse (ValueError) a number of processes that the parallel sizes do not divide, or in which some process would
    be a rank of neither module. The provider is finalised or not.
    """
    if (split := provider.dist_train).use_dist_train:
        check(_DIST_TRAIN_SIZES, provider)
        if (ranks := split.vision_world_size + split.language_world_size) != world:
            raise ValueError(
                f"dist_train.vision_world_size {split.vision_world_size} and language_world_size "
                f"{split.language_world_size} add up to {ranks}, expected {world}, the number of processes: each is "
                "either a vision or a language rank"
            )
        return
    check(SIZES, provider)
    sizes = {
        kind: getattr(provider, name)
        for kind, name in (("tensor", _TENSOR), ("pipeline", _STAGES), ("context", _CONTEXT))
    }
    product = math.prod(sizes.values())
    if world % product:
        written = " * ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"the run has {world} process{'es' if world > 1 else ''}, expected a multiple of {product}, the product of "
            f"the parallel sizes ({written}): use torchrun --nproc_per_node {product}, or change the sizes, such as "
            "model.tensor_model_parallel_size=1 model.sequence_parallel=False"
        )


def check_microbatches(provider: VisionLanguageFields, microbatches: int, owner: str) -> None:
    """Refuse (ValueError) a number of microbatches of one data-parallel rank, in a step of interleaved stages, that
    megatron-core's schedule does not support; `owner` has them, for the message.
    """
    if provider.virtual_pipeline_model_parallel_size is None:
        return
    stages = provider.pipeline_model_parallel_size
    group = provider.microbatch_group_size_per_vp_stage or stages
    if microbatches < group or 0 < microbatches % group < stages:
        raise ValueError(
            f"{owner} has {microbatches} microbatches on each data-parallel rank, expected a multiple of {group}, or a "
            f"remainder of at least {stages}: interleaved stages process them in groups "
            "(model.microbatch_group_size_per_vp_stage)"
        )
