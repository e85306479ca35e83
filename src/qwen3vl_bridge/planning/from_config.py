"""The memory of a run, from its Megatron-Bridge `ConfigContainer`; settings that change memory and are not modelled are
refused.

The configuration is read only through attributes, because its own classes bring their modules.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.planning.estimate import MemoryEstimate, estimate
from qwen3vl_bridge.planning.hardware import Gpu
from qwen3vl_bridge.planning.model_states import STORED_BYTES, stage_states
from qwen3vl_bridge.planning.proposals import propose
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import (
    LINEAR_LAYERS,
    EightBits,
    LoraSettings,
    Precision,
    Recompute,
    Sharding,
    TrainingSettings,
)
from qwen3vl_bridge.weights.rows import Part

# Settings that the planner does not model, by section, each with the values that cost no memory.
_NOT_MODELLED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
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


def plan_of(cfg: Any, world_size: int) -> MemoryEstimate:
    """The memory of each rank of a run of one of our models, whose configuration is finalised or not, and only read.

    Raises:
        ValueError: a setting that changes memory and is not modelled, or an invalid one.
    """
    for section, settings in _NOT_MODELLED.items():
        for name, harmless in settings.items():
            value = getattr(getattr(cfg, section, None), name, harmless[0])
            if value not in harmless:
                raise ValueError(
                    f"{section}.{name} is {value!r}, expected {harmless[0]!r}: it changes memory use, and the planner "
                    "does not model it"
                )
    dims, training = cfg.model.dimensions().with_vocab(cfg.model.padded_vocab_size), _training_settings(cfg)
    split, vision_split = splits_of(cfg, world_size)
    return estimate(dims, split, training, vision_split)


def splits_of(cfg: Any, world_size: int) -> tuple[ModelSplit, ModelSplit | None]:
    """How a run's ranks split the model, and separate vision ranks the tower; errors as `plan_of`."""
    dist_train, vision_split = getattr(cfg.model, "dist_train", None), None
    if dist_train is not None and dist_train.use_dist_train:
        sizes = (dist_train.vision_world_size, dist_train.language_world_size)
        if None in sizes or sum(sizes) != world_size:
            raise ValueError(
                f"dist_train has {sizes[0]} vision and {sizes[1]} language ranks, expected {world_size} together"
            )
        vision_split = ModelSplit(sizes[0], tp=dist_train.vision_tensor_model_parallel_size or 1)
        world_size = dist_train.language_world_size
    return _model_split(cfg.model, world_size), vision_split


def checkpoints_of(cfg: Any) -> tuple[int, int]:
    """How many checkpoints a completed run saves, and how many of them it keeps."""
    settings, steps = cfg.checkpoint, cfg.train.train_iters or 1
    saves = math.ceil(steps / settings.save_interval) if settings.save_interval else 1
    most = settings.most_recent_k
    return saves, saves if most is None or most < 0 else min(saves, most)


def checkpoint_bytes(cfg: Any) -> int:
    """Bytes of one of a run's checkpoints: its weights, or its adapters, with the optimizer's state of what is trained.

    Raises:
        ValueError: as `plan_of`.
    """
    dims, training, whole = cfg.model.dimensions(), _training_settings(cfg), ModelSplit(1)
    states = stage_states(dims, whole, whole.chunks(len(dims.indices["text_layers"]))[0], training)
    weight = training.precision.weight
    trained = states.host_written // (weight + STORED_BYTES)
    weights = states.parameters if training.lora is None else weight * trained
    return weights + STORED_BYTES * trained * cfg.checkpoint.save_optim


def proposals_for_run(cfg: Any, plan: MemoryEstimate, gpu: Gpu) -> list[MemoryEstimate]:
    """Splits that fit, for the rows, number of GPUs and sharding of a run and its plan; a ValueError if none can be."""
    world = plan.split.world + (plan.vision_split.world if plan.vision_split else 0)
    dims = cfg.model.dimensions().with_vocab(cfg.model.padded_vocab_size)
    return propose(dims, world, gpu, plan.training, vision_split=plan.vision_split)[0]


def _model_split(model: Any, world_size: int) -> ModelSplit:
    layout = model.pipeline_model_parallel_layout
    if layout is not None:
        if not hasattr(layout, "layout"):
            raise ValueError(
                f"pipeline_model_parallel_layout is {layout!r}, which megatron-core parses when the model is "
                "finalised; call cfg.model.finalize() first"
            )
        layout = tuple(
            tuple(sum(kind.name == "decoder" for kind in chunk) for chunk in stage) for stage in layout.layout
        )
    return ModelSplit(
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
        layout=layout,
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
        eight_bits=_eight_bits(cfg),
        sharding=sharding,
        recompute=_recomputation(model, ""),
        vision_recompute=_recomputation(model, "vision_"),
        frozen=frozenset(part for part in Part if getattr(model, f"freeze_{part.value}")),
        lora=_lora(cfg.peft),
        transformer_engine=model.transformer_impl == "transformer_engine",
        on_gpu=True,
        delta_rule_kernels=importlib.util.find_spec("fla") is not None,
        fused_activation=model.bias_activation_fusion,
        loss_fusion=model.cross_entropy_fusion_impl if model.cross_entropy_loss_fusion else None,
        loss_chunk_tokens=model.loss_chunk_tokens,
        balancing_loss=bool(getattr(model, "moe_aux_loss_coeff", 0)),
        overlaps_experts=model.overlap_moe_expert_parallel_comm,
        trains_mtp=model.trains_mtp,
        made_on_host=model.init_model_with_meta_device,
        saved_by_parameters=cfg.checkpoint.dist_ckpt_optim_fully_reshardable,
    )


def _precision(cfg: Any) -> Precision:
    """Mixed precision is applied when a run is set up, so its setting counts before the model's own."""
    mixed, optimizer = cfg.mixed_precision, cfg.optimizer
    weight, in_float = _bytes(cfg.model.params_dtype), cfg.ddp.grad_reduce_in_fp32
    if isinstance(mixed, str):
        if mixed != _BF16_MIXED:
            raise ValueError(
                f"mixed_precision is {mixed!r}, expected {_BF16_MIXED!r} or None before the run is completed, which "
                "says what others mean"
            )
        weight, in_float = 2, True
    elif mixed is not None:
        if mixed.fp16 or mixed.fp4:
            raise ValueError("mixed_precision has fp16 or fp4, expected bf16, with fp8 or without, or None")
        weight, in_float = (2 if mixed.bf16 else 4), mixed.grad_reduce_in_fp32
    gradient = 4 if in_float else weight
    main, moments = (0 if weight == 4 else 4), 8
    if optimizer.use_precision_aware_optimizer:
        moments = _bytes(optimizer.exp_avg_dtype) + _bytes(optimizer.exp_avg_sq_dtype)
        main = _bytes(optimizer.main_params_dtype) * (weight != 4)
        if main == 4 and getattr(optimizer, "store_param_remainders", False):
            main = 2  # the half of a float32 number that bfloat16 lacks
    # Megatron-FSDP has settings of its own, and main weights of float32 parameters too. Source: megatron-core 0.19,
    # `megatron_fsdp/param_and_grad_buffer.py`.
    if cfg.ddp.use_megatron_fsdp:
        gradient = _bytes(cfg.ddp.megatron_fsdp_main_grads_dtype) or weight
        main = _bytes(cfg.ddp.megatron_fsdp_main_params_dtype)
    return Precision(weight, gradient, main, moments)


_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def _eight_bits(cfg: Any) -> EightBits | None:
    """Products in 8 bits, of mixed precision where it is set, or of the model."""
    model, mixed = cfg.model, cfg.mixed_precision
    source = model if mixed is None or isinstance(mixed, str) else mixed
    if not getattr(source, "fp8", None):
        return None
    recipe = getattr(source.fp8_recipe, "value", source.fp8_recipe)
    if recipe not in _RECIPES:
        raise ValueError(f"fp8_recipe is {recipe!r}, expected one of {', '.join(_RECIPES)}: others are not counted")
    ends = bool(source.first_last_layers_bf16)
    return EightBits(
        multiple=32 if recipe == "mxfp8" else 16,
        weights=bool(source.fp8_param),
        first=source.num_layers_at_start_in_bf16 * ends,
        last=source.num_layers_at_end_in_bf16 * ends,
        exempt=model.layers_in_16_bits,
        scale=1 / 32 if recipe == "mxfp8" else 0.0,
    )


def _bytes(dtype: Any) -> int:
    """Bytes of a number of a torch dtype; 0 for None."""
    return 0 if dtype is None else dtype.itemsize


def _recomputation(model: Any, prefix: str) -> Recompute:
    granularity = getattr(model, f"{prefix}recompute_granularity")
    modules = getattr(model, f"{prefix}recompute_modules") or ["core_attn"]  # as megatron-core completes it
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
            f"peft is a {type(peft).__name__}, expected Qwen3VLLoRA or Qwen3VLDoRA: other adapters are not counted"
        )
    expected = {f"freeze_{part.value}": True for part in Part} | {"dropout": 0.0, "exclude_modules": []}
    expected |= {f"adapt_{part.value}": part is Part.LANGUAGE_MODEL for part in Part} | {"adapt_experts": False}
    for name, value in expected.items():
        if (actual := getattr(peft, name)) != value:
            raise ValueError(f"peft.{name} is {actual!r}, expected {value!r}: anything else is not counted")
    if unknown := set(peft.target_modules) - set(LINEAR_LAYERS):
        raise ValueError(f"peft.target_modules has {sorted(unknown)}, expected some of {list(LINEAR_LAYERS)}")
    targets = tuple(name for name in LINEAR_LAYERS if name in peft.target_modules)
    regathers = getattr(peft, "sequence_parallel_input_regather", False)
    return LoraSettings(peft.dim, targets, regathers=regathers, dora="Qwen3VLDoRA" in kinds)
