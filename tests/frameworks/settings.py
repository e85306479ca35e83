"""What frameworks set on a provider, as their sources and example configurations have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend

_ONE_GPU = dict(
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=1,
    sequence_parallel=False,
)
# NeMo-RL, examples/configs/grpo_math_1B.yaml, as setup.py applies it to a model's provider; but for the fused
# permutation of experts' tokens: Transformer Engine has that.
NEMO_RL: Mapping[str, Any] = dict(
    **_ONE_GPU,
    num_layers_in_first_pipeline_stage=None,
    num_layers_in_last_pipeline_stage=None,
    moe_router_dtype="fp64",
    moe_router_load_balancing_type="none",
    moe_router_bias_update_rate=0.0,
    moe_enable_deepep=False,
    moe_token_dispatcher_type="alltoall",
    moe_shared_expert_overlap=False,
    moe_permute_fusion=False,
    moe_enable_routing_replay=False,
    mtp_num_layers=0,
    mtp_loss_scaling_factor=0.0,
    mtp_use_repeated_layer=False,
    mtp_detach_heads=False,
    bf16=True,
    fp16=False,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    parallel_output=True,
    apply_rope_fusion=True,
    bias_activation_fusion=True,
    gradient_accumulation_fusion=False,
    use_fused_weighted_squared_relu=False,
    cuda_graph_impl="none",
    cuda_graph_modules=[],
    cuda_graph_warmup_steps=3,
    fine_grained_activation_offloading=False,
    offload_modules=[],
    calculate_per_token_loss=True,
    perform_initialization=True,
)
# verl, workers/engine/megatron/transformer_impl.py.
VERL: Mapping[str, Any] = dict(
    **_ONE_GPU,
    virtual_pipeline_model_parallel_size=None,
    overlap_p2p_comm=False,
    batch_p2p_comm=False,
    variable_seq_lengths=True,
    attention_backend=AttnBackend.flash,
    moe_token_dispatcher_type="alltoall",
    moe_router_load_balancing_type="none",
)
# miles, backends/megatron_utils/model_provider.py, as its GRPO scripts' arguments have it.
MILES: Mapping[str, Any] = dict(
    **_ONE_GPU,
    calculate_per_token_loss=False,
    variable_seq_lengths=True,
    attention_softmax_in_fp32=True,
    fp32_residual_connection=False,
    deterministic_mode=False,
    recompute_granularity="full",
    recompute_method="uniform",
    recompute_num_layers=1,
    recompute_modules=None,
    cpu_offloading_num_layers=0,
    distribute_saved_activations=False,
    tp_comm_overlap=False,
    fp8=None,
    fp8_recipe="delayed",
    attention_backend=AttnBackend.flash,
    moe_token_dispatcher_type="alltoall",
)
