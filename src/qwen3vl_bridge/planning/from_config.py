"""Estimate the memory of a run from its Megatron-Bridge `ConfigContainer`.

Settings with an effect on memory that the planner does not know raise ValueError. The configuration is read through
attributes only: importing its classes would import Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.lazy import is_installed
from qwen3vl_bridge.planning.estimate import MemoryEstimate, estimate
from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.model_states import STORED_BYTES, estimate_states
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.proposals import propose
from qwen3vl_bridge.planning.training_settings import (
    LINEAR_LAYERS,
    Fp8Settings,
    LoraSettings,
    Precision,
    Recompute,
    Sharding,
    TrainingSettings,
)
from qwen3vl_bridge.weights.rows import Component

# Settings with an effect on memory that the planner does not know, by section, with the values that have no effect.
_NOT_MODELED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "model": {
        "fp16": (False,), "fp4": (None, False), "fp32_residual_connection": (False,),
        "cpu_offloading": (False,), "fine_grained_activation_offloading": (False,),
        "distribute_saved_activations": (False, None), "cuda_graph_impl": ("none", None),
        "enable_cuda_graph": (False,), "delay_wgrad_compute": (False,), "parallel_output": (True,),
    },
    "optimizer": {"optimizer": ("adam",), "optimizer_cpu_offload": (False,)},
    "ddp": {
        "num_distributed_optimizer_instances": (1,), "outer_dp_sharding_strategy": ("no_shard", None),
        "param_name_patterns_for_fp32_local_accumulation": ((),),
        "megatron_fsdp_grad_comm_dtype": (None,), "delay_wgrad_compute": (False,), "keep_fp8_transpose_cache": (False,),
    },
    "comm_overlap": {"delay_wgrad_compute": (None, False)},
    "dist": {"use_torch_fsdp2": (False,)},
    "train": {"rampup_batch_size": (None,)},
}  # fmt: skip
_BF16_MIXED = "bf16_mixed"


def estimate_run(cfg: Any, world_size: int) -> MemoryEstimate:
    """Estimate the memory of each rank of a run. The configuration need not be finalized, and is not changed.

    Raises:
        ValueError: A setting has an effect on memory that the planner does not know, or a setting is invalid.
    """
    for section, settings in _NOT_MODELED.items():
        for name, modeled in settings.items():
            value = getattr(getattr(cfg, section, None), name, modeled[0])
            if value not in modeled:
                raise ValueError(
                    f"{section}.{name} is {value!r}, expected {modeled[0]!r}: the planner does not know the effect of "
                    "other values on memory"
                )
    dims, training = cfg.model.dimensions().with_vocab(cfg.model.padded_vocab_size), _training_settings(cfg)
    layout, vision_layout = read_layouts(cfg, world_size)
    return estimate(dims, layout, training, vision_layout)


def read_layouts(cfg: Any, world_size: int) -> tuple[ParallelLayout, ParallelLayout | None]:
    """Return the parallel layout of the language model, and the layout of separate vision ranks or None.

    Raises:
        ValueError: See `estimate_run`.
    """
    dist_train, vision_layout = getattr(cfg.model, "dist_train", None), None
    if dist_train is not None and dist_train.use_dist_train:
        sizes = (dist_train.vision_world_size, dist_train.language_world_size)
        if None in sizes or sum(sizes) != world_size:
            raise ValueError(
                f"dist_train has {sizes[0]} vision and {sizes[1]} language ranks, expected a total of {world_size}"
            )
        vision_layout = ParallelLayout(sizes[0], tp=dist_train.vision_tensor_model_parallel_size or 1)
        world_size = dist_train.language_world_size
    return _language_layout(cfg.model, world_size), vision_layout


def count_checkpoints(cfg: Any) -> tuple[int, int]:
    """Return the number of checkpoints that a complete run saves, and the number that it keeps."""
    settings, steps = cfg.checkpoint, cfg.train.train_iters or 1
    saves = math.ceil(steps / settings.save_interval) if settings.save_interval else 1
    most = settings.most_recent_k
    if most is not None and most >= 0:
        best = getattr(settings, "keep_best", None) is not None  # Megatron-Bridge's own class lacks it
        return saves, min(saves, most + best)
    return saves, saves


def checkpoint_bytes(cfg: Any) -> int:
    """Return the bytes of one checkpoint of a run: weights (only adapters under PEFT) and optimizer state.

    Raises:
        ValueError: See `estimate_run`.
    """
    dims, training, unsharded = cfg.model.dimensions(), _training_settings(cfg), ParallelLayout(1)
    states = estimate_states(dims, unsharded, unsharded.chunks(len(dims.indices["text_layers"]))[0], training)
    weight = training.precision.weight
    trained = states.host_written // (weight + STORED_BYTES)
    weights = states.parameters if training.lora is None else weight * trained
    return weights + STORED_BYTES * trained * cfg.checkpoint.save_optim


def propose_for_run(cfg: Any, plan: MemoryEstimate, gpu: Gpu) -> list[MemoryEstimate]:
    """Return estimates of parallel layouts that fit into `gpu`, with the rows, number of GPUs and sharding of `plan`.

    Raises:
        ValueError: No layout is possible.
    """
    world = plan.layout.world + (plan.vision_layout.world if plan.vision_layout else 0)
    dims = cfg.model.dimensions().with_vocab(cfg.model.padded_vocab_size)
    return propose(dims, world, gpu, plan.training, vision_layout=plan.vision_layout)[0]


def _language_layout(model: Any, world_size: int) -> ParallelLayout:
    pipeline_layout = model.pipeline_model_parallel_layout
    if pipeline_layout is not None:
        if not hasattr(pipeline_layout, "layout"):
            raise ValueError(
                f"pipeline_model_parallel_layout is {pipeline_layout!r}, which megatron-core parses when the model is "
                "finalized; call cfg.model.finalize() first"
            )
        pipeline_layout = tuple(
            tuple(sum(kind.name == "decoder" for kind in chunk) for chunk in stage) for stage in pipeline_layout.layout
        )
    return ParallelLayout(
        world=world_size,
        tp=model.tensor_model_parallel_size,
        pp=model.pipeline_model_parallel_size,
        cp=model.context_parallel_size,
        ep=model.expert_model_parallel_size,
        etp=model.expert_tensor_parallel_size if model.moe_layers else None,
        vpp=model.virtual_pipeline_model_parallel_size,
        vpp_group=getattr(model, "microbatch_group_size_per_vp_stage", None),
        sequence_parallel=model.sequence_parallel,
        first_layers=model.num_layers_in_first_pipeline_stage,
        last_layers=model.num_layers_in_last_pipeline_stage,
        embedding_as_layer=bool(model.account_for_embedding_in_pipeline_split),
        loss_as_layer=bool(model.account_for_loss_in_pipeline_split),
        pipeline_layout=pipeline_layout,
        linear_cp_mode=getattr(model, "linear_cp_mode", None),
    )


def _training_settings(cfg: Any) -> TrainingSettings:
    model, sharding = cfg.model, Sharding.NONE
    if cfg.ddp.use_megatron_fsdp:
        sharding = Sharding(cfg.ddp.data_parallel_sharding_strategy)
    elif cfg.ddp.use_distributed_optimizer or cfg.optimizer.use_distributed_optimizer:
        sharding = Sharding.OPTIMIZER
    return TrainingSettings(
        seq_length=cfg.dataset.seq_length,
        micro_batch_size=cfg.train.micro_batch_size,
        global_batch_size=cfg.train.global_batch_size,
        max_patches=getattr(cfg.dataset, "max_patches", None),
        precision=_precision(cfg),
        fp8=_fp8(cfg),
        sharding=sharding,
        recompute=_recomputation(model, ""),
        vision_recompute=_recomputation(model, "vision_"),
        frozen=frozenset(part for part in Component if getattr(model, f"freeze_{part.value}")),
        lora=_lora(cfg.peft),
        transformer_engine=model.transformer_impl == "transformer_engine",
        on_gpu=True,
        delta_rule_kernels=is_installed("fla"),
        fused_activation=model.bias_activation_fusion,
        loss_fusion=model.cross_entropy_fusion_impl if model.cross_entropy_loss_fusion else None,
        loss_chunk_tokens=model.loss_chunk_tokens,
        balancing_loss=bool(getattr(model, "moe_aux_loss_coeff", 0)),
        overlaps_experts=model.overlap_moe_expert_parallel_comm,
        trains_mtp=model.trains_mtp,
        freezes_ngram_table=getattr(model, "freeze_ngram_table", False),
        fp8_ngram_table=getattr(model, "ngram_table_dtype", None) is not None,
        init_on_cpu=model.init_model_with_meta_device,
        fully_reshardable=cfg.checkpoint.dist_ckpt_optim_fully_reshardable,
    )


def _precision(cfg: Any) -> Precision:
    # Mixed precision overrides the model's dtype when a run is set up.
    mixed, optimizer = cfg.mixed_precision, cfg.optimizer
    weight, fp32_gradients = _bytes(cfg.model.params_dtype), cfg.ddp.grad_reduce_in_fp32
    if isinstance(mixed, str):
        if mixed != _BF16_MIXED:
            raise ValueError(
                f"mixed_precision is {mixed!r}, expected {_BF16_MIXED!r}, None or a MixedPrecisionConfig; other names "
                "are known only after the configuration is finalized"
            )
        weight, fp32_gradients = 2, True
    elif mixed is not None:
        if mixed.fp16 or mixed.fp4:
            raise ValueError("mixed_precision has fp16 or fp4, expected bf16 (with or without fp8) or None")
        weight, fp32_gradients = (2 if mixed.bf16 else 4), mixed.grad_reduce_in_fp32
    gradient = 4 if fp32_gradients else weight
    main, moments = (0 if weight == 4 else 4), 8
    if optimizer.use_precision_aware_optimizer:
        moments = _bytes(optimizer.exp_avg_dtype) + _bytes(optimizer.exp_avg_sq_dtype)
        main = _bytes(optimizer.main_params_dtype) * (weight != 4)
        if main == 4 and getattr(optimizer, "store_param_remainders", False):
            main = 2  # the lower half of float32, which bfloat16 lacks
    # Megatron-FSDP has its own settings, and also keeps main weights of float32 parameters. Source: megatron-core 0.19,
    # `megatron_fsdp/param_and_grad_buffer.py`.
    if cfg.ddp.use_megatron_fsdp:
        gradient = _bytes(cfg.ddp.megatron_fsdp_main_grads_dtype) or weight
        main = _bytes(cfg.ddp.megatron_fsdp_main_params_dtype)
    return Precision(weight, gradient, main, moments)


_FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def _fp8(cfg: Any) -> Fp8Settings | None:
    model, mixed = cfg.model, cfg.mixed_precision
    source = model if mixed is None or isinstance(mixed, str) else mixed
    if not getattr(source, "fp8", None):
        return None
    recipe = getattr(source.fp8_recipe, "value", source.fp8_recipe)
    if recipe not in _FP8_RECIPES:
        raise ValueError(
            f"fp8_recipe is {recipe!r}, expected one of {', '.join(_FP8_RECIPES)}, which the planner supports"
        )
    bf16_ends = bool(source.first_last_layers_bf16)
    return Fp8Settings(
        multiple=32 if recipe == "mxfp8" else 16,
        fp8_param=bool(source.fp8_param),
        first_bf16_layers=source.num_layers_at_start_in_bf16 * bf16_ends,
        last_bf16_layers=source.num_layers_at_end_in_bf16 * bf16_ends,
        bf16_linears=model.layers_in_16_bits,
        scale=1 / 32 if recipe == "mxfp8" else 0.0,
    )


def _bytes(dtype: Any) -> int:
    """Return the bytes per element of a torch dtype; 0 for None."""
    return 0 if dtype is None else dtype.itemsize


def _recomputation(model: Any, prefix: str) -> Recompute:
    granularity = getattr(model, f"{prefix}recompute_granularity")
    modules = getattr(model, f"{prefix}recompute_modules") or ["core_attn"]  # megatron-core's default
    if granularity == "full":
        method, number = (getattr(model, f"{prefix}recompute_{name}") for name in ("method", "num_layers"))
        return Recompute("full", method=method, num_layers=number)
    return Recompute(granularity, frozenset(modules) if granularity else frozenset())


def _lora(peft: Any) -> LoraSettings | None:
    if peft is None:
        return None
    kinds = {base.__name__ for base in type(peft).__mro__}
    if not kinds & {"Qwen3VLLoRA", "Qwen3VLDoRA"}:
        raise ValueError(
            f"peft is a {type(peft).__name__}, expected Qwen3VLLoRA or Qwen3VLDoRA, which the planner supports"
        )
    expected = {f"freeze_{part.value}": True for part in Component} | {"dropout": 0.0, "exclude_modules": []}
    expected |= {f"adapt_{part.value}": part is Component.LANGUAGE_MODEL for part in Component} | {
        "adapt_experts": False
    }
    for name, value in expected.items():
        if (actual := getattr(peft, name)) != value:
            raise ValueError(
                f"peft.{name} is {actual!r}, expected {value!r}: the planner does not support other values"
            )
    if unknown := set(peft.target_modules) - set(LINEAR_LAYERS):
        raise ValueError(f"peft.target_modules has {sorted(unknown)}, expected some of {list(LINEAR_LAYERS)}")
    targets = tuple(name for name in LINEAR_LAYERS if name in peft.target_modules)
    regather = getattr(peft, "sequence_parallel_input_regather", False)
    return LoraSettings(peft.dim, targets, regather_inputs=regather, dora="Qwen3VLDoRA" in kinds)
