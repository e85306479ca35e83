"""Check a run's configuration for settings that would be ignored, fail late in the run, or write wrong files.

The names in capitals are tables of checks; tables of the model are in `config/model_validation.py`. In a run that is
started with `finetune(cfg, forward_step, callbacks=training_callbacks(cfg))`, they run in this order:

1. BEFORE_RUN: `training_callbacks`.
2. BEFORE_OVERLAP: `Qwen3VLConfigContainer.set_data_parallel_size`, which Megatron-Bridge calls before `comm_overlap`
   sets fields of the model.
3. BEFORE_VALIDATE: `Qwen3VLConfigContainer.validate`, at its beginning. `check_or_shorten_warmup` follows.
4. PARALLEL_SIZES, MOE or DENSE, `checks` of the family, BEFORE_FINALIZE, AFTER_FINALIZE: `finalize` of the model's
   provider, which Megatron-Bridge's own validation calls between 3 and 5.
5. AFTER_VALIDATE: `Qwen3VLConfigContainer.validate`, after Megatron-Bridge's own validation. The table includes
   MODEL_CAN_TRAIN, ON_META_DEVICE and RUN_CAN_START.
6. MODEL_CAN_TRAIN: `provide_distributed_model` of the provider, when the model is built.
7. RUN_CAN_START, ON_THIS_MACHINE: `StepGuard.on_train_start`, before the first step.
8. MODEL_CAN_TRAIN or ON_FORWARD: `VisionLanguageModel.check_settings`, in the first forward pass in training or
   evaluation mode, and again after a setting of the model has changed.

With Megatron-Bridge's own `ConfigContainer`, 2, 3 and 5 do not run; 6 and 7 still run MODEL_CAN_TRAIN and
RUN_CAN_START.
"""

from __future__ import annotations

import logging
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qwen3vl_bridge.checkpoint.formats.huggingface import exists_on_hub, find_in_cache, is_path
from qwen3vl_bridge.config import model_validation
from qwen3vl_bridge.config.checks import (
    IGNORED,
    Check,
    Condition,
    Requires,
    Values,
    at_least,
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
    undeclared_names,
)
from qwen3vl_bridge.config.fields import dist_train_replicas
from qwen3vl_bridge.config.other_trainers import suggest_settings
from qwen3vl_bridge.core.atomic import free_space
from qwen3vl_bridge.data.dataset_provider import ConversationSettings, Qwen3VLConversationProvider
from qwen3vl_bridge.peft.lora import Qwen3VLAdapters
from qwen3vl_bridge.planning.from_config import checkpoint_bytes, count_checkpoints, estimate_run
from qwen3vl_bridge.planning.hardware import GIB, host_bytes
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.terminal import in_bytes
from qwen3vl_bridge.training import allocator
from qwen3vl_bridge.training.checkpoint_manager import MANAGER
from qwen3vl_bridge.training.objective_validation import OBJECTIVE
from qwen3vl_bridge.training.resuming import check_checkpoint_exists
from qwen3vl_bridge.weights.rows import Component

import torch
from megatron.bridge.training.config import TokenizerConfig
from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe

logger = logging.getLogger(__name__)

_RATES = "optimizer_config_override_provider"
_DIST_TRAIN = is_on("model.dist_train.use_dist_train")
_FSDP = is_on("ddp.use_megatron_fsdp")
_USE_FSDP = "ddp.use_megatron_fsdp dist.use_megatron_fsdp"
_ENDS_RUN_ON_NAN = ("rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad")

# --- Before Megatron-Bridge completes a configuration ---

# Attributes that Megatron sets on sections when it completes them.
_SET_BY_MEGATRON = (
    *("data_parallel_size", "comm_overlap.user_comm_overlap_cfg"),
    "optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8",
)


def check_names(cfg: Any) -> None:
    """Raise ValueError if a section of the configuration contains an unknown setting, such as a misspelled name.

    The provider checks its own attributes. Sections of a user's own class may have any attributes.
    """

    def subsections(prefix: str, owner: Any) -> dict[str, Any]:
        found = {f"{prefix}{field.name}.": getattr(owner, field.name) for field in fields(owner)}
        return {name: value for name, value in found.items() if is_dataclass(value) and name != "model."}

    sections = {"": cfg, **subsections("", cfg)}
    sections |= {
        name: value
        for prefix, owner in sections.items()
        if prefix
        for name, value in subsections(prefix, owner).items()
    }
    packages = ("megatron", "qwen3vl_bridge")
    sections = {name: s for name, s in sections.items() if type(s).__module__.partition(".")[0] in packages}
    known = [prefix + field.name for prefix, owner in sections.items() for field in fields(owner)]
    for prefix, owner in sections.items():
        for field in undeclared_names(owner):
            if (name := prefix + field) not in _SET_BY_MEGATRON:
                raise ValueError(
                    f"{name} is set to {getattr(owner, field)!r}, but there is no setting {name}"
                    f"{suggest_settings(name, known)}"
                )


def _check_processor(cfg: Any) -> None:
    """Warn if a run starts from a local folder with a processor, but the processor or tokenizer is set to a hub id.

    Without a local copy and without a connection, transformers would try to download both for more than a minute.

    Raises:
        ValueError: a folder does not exist; or a hub id has no local copy, and cannot be found on the hub.
    """
    folder = cfg.checkpoint.pretrained_checkpoint
    if not folder or not all((Path(folder) / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        return
    found = {
        "dataset.hf_processor_path": getattr(cfg.dataset, "hf_processor_path", None),
        "tokenizer.tokenizer_model": getattr(cfg.tokenizer, "tokenizer_model", None),
    }
    found = {name: str(value) for name, value in found.items() if value and not Path(value).exists()}
    for name, value in found.items():
        if is_path(value):
            raise ValueError(f"{name} is {value}: there is no such folder")
    copies = {value: find_in_cache(value) for value in found.values()}
    found = {name: value for name, value in found.items() if copies[value] != Path(folder)}
    if not found or get_rank_safe() != 0:  # only the first rank asks the hub; under torchrun the others end with it
        return
    message = (
        f"{' and '.join(found)} name {' and '.join(dict.fromkeys(found.values()))} on the hub, but "
        f"checkpoint.pretrained_checkpoint is {folder}, which contains its own processor. Set each to {folder}; in "
        f"Python, set_paths(cfg, hf_path={str(folder)!r}) of qwen3vl_recipes.paths sets both and the model"
    )
    if not all(copies[value] or exists_on_hub(value) for value in found.values()):
        raise ValueError(f"{message}. This machine has no copy of it, and the hub does not have it or does not answer")
    logger.warning(message)


def _trains_float32(cfg: Any) -> bool:
    """Return True if a run trains float32 parameters of a 16-bit model, which linear attention has, for example."""
    trained = cfg.model.params_dtype != torch.float32 and cfg.peft is None and not cfg.model.freeze_language_model
    return trained and any(row.float32 for row in family(cfg.model.family).rows())


_TWO_DTYPES = Condition("model.params_dtype", _trains_float32)
_FLOAT32 = Condition("model.params_dtype", lambda cfg: cfg.model.params_dtype == torch.float32 or _trains_float32(cfg))
_EMERGING = Condition("optimizer.optimizer", lambda cfg: cfg.optimizer.optimizer not in ("adam", "sgd"))


def microbatches_per_rank(cfg: Any, data_parallel_size: int) -> int:
    """Return the number of microbatches that each data-parallel rank processes in a step.

    Raises:
        ValueError: the ranks would process different numbers of microbatches.
    """
    rows, divisor = cfg.train.global_batch_size, cfg.train.micro_batch_size * data_parallel_size
    if rows % divisor:
        raise ValueError(
            f"train.global_batch_size is {rows}, expected a multiple of {divisor}: train.micro_batch_size times "
            f"{data_parallel_size} data-parallel ranks"
        )
    return rows // divisor


def check_balance(cfg: Any) -> None:
    """Raise ValueError if `dataset.balance_over` does not divide the global batch size, or if that size is ramped up.

    Without this check, the rows of a step would depend on the number of ranks.
    """
    if (over := getattr(cfg.dataset, "balance_over", None)) is None:
        return
    rows, ramp = cfg.train.global_batch_size, cfg.train.rampup_batch_size
    if rows % over or ramp is not None:
        ramped = "" if ramp is None else f", rampup_batch_size {ramp}"
        raise ValueError(
            f"dataset.balance_over is {over} with train.global_batch_size {rows}{ramped}, expected a constant global "
            f"batch size that balance_over divides: set dataset.balance_over={rows}"
        )


def check_or_shorten_warmup(cfg: Any) -> None:
    """Raise ValueError if the learning-rate warm-up is as long as the schedule or longer, or shorten the warm-up.

    The learning rate would never reach `optimizer.lr`. If the warm-up is a recipe's default, and the command line
    changed only the length of the run, set the warm-up to a twentieth of this length instead.
    """
    schedule, kind = cfg.scheduler, "iters" if cfg.train.train_samples is None else "samples"
    lengths = {
        "scheduler.max_steps": schedule.max_steps if kind == "iters" else None,
        f"scheduler.lr_decay_{kind}": getattr(schedule, f"lr_decay_{kind}"),
        f"train.train_{kind}": getattr(cfg.train, f"train_{kind}"),
    }
    name, length = next(((name, value) for name, value in lengths.items() if value is not None), ("", 0))
    setting, warmup = f"scheduler.lr_warmup_{kind}", getattr(schedule, f"lr_warmup_{kind}")
    if not warmup or not warmup >= length > 0:
        return
    if not cfg.has_recipes_warmup:
        raise ValueError(
            f"{setting} is {warmup} with {name} {length}: the learning rate would never reach optimizer.lr. Set a "
            f"shorter warm-up, such as {setting}={length // 20}. If these are the first steps of a longer run, set "
            f"scheduler.lr_decay_{kind} to the length of that run instead"
        )
    setattr(schedule, f"lr_warmup_{kind}", length // 20)
    if get_rank_safe() == 0:
        logger.info("the recipe's %s of %d is shortened to %d: %s is %d", setting, warmup, length // 20, name, length)


def _warn_about_nan_checks(cfg: Any) -> None:
    for name in _ENDS_RUN_ON_NAN:
        if cfg.guard is not None and is_on(name)(cfg):
            logger.warning("%s ends the run before the guard can name the bad samples; set it to False", name)


def _warn_about_rounding(cfg: Any) -> None:
    if cfg.optimizer.optimizer_cpu_offload and cfg.checkpoint.load and cfg.checkpoint.load_optim:
        logger.warning(
            "optimizer.optimizer_cpu_offload is True: a resumed run begins with main weights that are rounded to the "
            "model's dtype, because Megatron-Bridge overwrites the loaded main weights by the model's weights"
        )


def _warn_about_allocator(cfg: Any) -> None:
    """Warn if a run on a GPU sets no options of torch's allocator.

    Recipes nearly fill the memory of GPUs, so they need expandable segments.
    """
    # Megatron-Bridge's set-up sets `env_vars`, which is too late if CUDA is initialized.
    is_set_in_time = allocator.VARIABLE in cfg.env_vars and not torch.cuda.is_initialized()
    if torch.cuda.is_available() and not allocator.is_configured() and not is_set_in_time and get_rank_safe() == 0:
        logger.warning(
            "%s is not set: torch's allocator fragments the memory of nearly full GPUs. Set %s=%s in the environment, "
            "or in the script before Megatron-Bridge is imported; `qwen3vl train` does",
            *(allocator.VARIABLE, allocator.VARIABLE, allocator.SETTING),
        )


def _saves_or_loads(cfg: Any) -> bool:
    return bool(cfg.checkpoint.save or cfg.checkpoint.load)


def _is_layer_wise(cfg: Any) -> bool:
    return cfg.optimizer.optimizer.startswith("dist_") or cfg.optimizer.use_layer_wise_distributed_optimizer


_SKIPS_NAN = Condition("guard.on_nan", lambda cfg: cfg.guard is not None and cfg.guard.on_nan == "skip")
_GENERATES = is_on("accuracy.path")
# Megatron-Bridge's own `CheckpointConfig` lacks the setting.
_KEEPS_BEST = Condition("checkpoint.keep_best", lambda cfg: getattr(cfg.checkpoint, "keep_best", None) is not None)
_KEEPS_ACCURACY = Condition(
    "checkpoint.keep_best", lambda cfg: getattr(cfg.checkpoint, "keep_best", None) == "accuracy"
)
QUANTIZED = is_on("model.restore_modelopt_state")
_GROUPS = "Megatron-Bridge creates the process groups of separate vision ranks only with this value"
_ONE_DTYPE = "it gathers parameters of one dtype in one call, but some parameters of linear attention are float32"

# Run just before Megatron-Bridge overwrites the model's settings by those of `comm_overlap`.
BEFORE_OVERLAP: tuple[Check, ...] = tuple(
    Requires(
        f"comm_overlap.{name}", True, is_on(f"model.{name}") & (lambda cfg: cfg.comm_overlap),
        why="comm_overlap overwrites the model's setting with it",
    )
    for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "defer_embedding_wgrad_compute")
)  # fmt: skip

# Run when a script calls `training_callbacks`; not in a dry run, which needs no data and weights.
BEFORE_RUN: tuple[Check, ...] = (
    check_names,
    lambda cfg: cfg.dataset.check_paths() if isinstance(cfg.dataset, Qwen3VLConversationProvider) else None,
    _check_processor,
    _warn_about_allocator,
)

BEFORE_VALIDATE: tuple[Check, ...] = (
    check_names,
    Requires("dataset.seq_length", same_as("model.seq_length"), why="both are the length of a row; set both"),
    # ModelOpt
    *requires_default(_USE_FSDP, "its checkpoints have no quantizers", QUANTIZED),
    *requires_default("dist.use_decentralized_pg", "ModelOpt needs megatron-core's global process groups", QUANTIZED),
    *requires_default(
        "dist.use_torch_fsdp2", "it needs parameters of one dtype and full models; use ddp.use_megatron_fsdp"
    ),
    # separate vision ranks
    Requires("dist.use_decentralized_pg", True, _DIST_TRAIN, why=_GROUPS),
    *requires_default("ddp.num_distributed_optimizer_instances", _GROUPS, _DIST_TRAIN),
    *requires_default(_USE_FSDP, "it shards the parameters of a single module", _DIST_TRAIN),
    Requires("peft", None, _DIST_TRAIN, why="adapters are applied to complete models"),
    *requires_default("accuracy.path", "generation needs the complete model", _DIST_TRAIN),
    *requires_default(
        "checkpoint.also_save_hf_checkpoint",
        "the first rank would write only the vision tower; convert the checkpoint instead",
        _DIST_TRAIN,
    ),
    *requires_default(
        "checkpoint.non_persistent_ckpt_type", "such runs resume only from persistent checkpoints", _DIST_TRAIN
    ),
    *requires_default(
        "rerun_state_machine.rerun_mode", "vision ranks cannot read their rows a second time", _DIST_TRAIN
    ),
    *requires_default(
        "checkpoint.custom_manager_class",
        "other managers would save the random states of vision and language ranks under the same names",
        _DIST_TRAIN & _saves_or_loads,
        also=(MANAGER,),
    ),
    # pairs of answers
    *OBJECTIVE,
    # overlapping the expert all-to-all, delayed weight gradients
    *requires_default(
        _USE_FSDP,
        "the schedule calls the components of a layer separately, and Megatron-FSDP gathers and frees full layers",
        is_on("model.overlap_moe_expert_parallel_comm"),
    ),
    Requires(
        "ddp.delay_wgrad_compute", True, is_on("model.delay_wgrad_compute"),
        why="gradients would be reduced before they are computed",
    ),
    Requires("ddp.delay_wgrad_compute", False, is_off("model.delay_wgrad_compute"), (None,), IGNORED),
    Requires(
        "peft", None, is_on("model.delay_wgrad_compute"),
        why="adapters' gradients would be computed in the backward pass, and frozen layers have none to delay",
    ),
    # parameters of two dtypes
    Requires("optimizer.optimizer", one_of("adam", "sgd", "lion", "muon"), _TWO_DTYPES, why=_ONE_DTYPE),
    *requires_default("optimizer.use_layer_wise_distributed_optimizer", _ONE_DTYPE, _TWO_DTYPES),
    Requires(
        "ddp.grad_reduce_in_fp32", True,
        is_on("model.virtual_pipeline_model_parallel_size") & is_off("ddp.use_distributed_optimizer")
        & is_off("ddp.use_megatron_fsdp") & _trains_float32,
        why="the gradients of a virtual stage are reduced in one call, which needs one dtype, but some parameters of "
        "linear attention are float32",
    ),
    lambda cfg: run_checks(model_validation.CUDA_GRAPHS, cfg.model),
    # accuracy and the best checkpoint
    Requires("accuracy.samples", at_least(1)),
    Requires(
        "accuracy.path", Values(lambda path, _: path is not None, lambda _: "a path"), _KEEPS_ACCURACY,
        why="accuracy is measured only with it",
    ),
    Requires("validation.eval_iters", at_least(1), _KEEPS_BEST, why="the best checkpoint is chosen by evaluation"),
    *requires_default(
        "checkpoint.async_save", "Megatron-Bridge would remove older checkpoints, even the best one", _KEEPS_BEST
    ),
    Requires(
        "checkpoint.save", Values(lambda path, _: path and "://" not in str(path), lambda _: "a local folder"),
        _KEEPS_BEST,
    ),
    Requires(
        "checkpoint.save_interval", multiple_of("validation.eval_interval"), _KEEPS_BEST, (None,),
        why="every saved checkpoint must be evaluated, to keep the best",
    ),
    Requires("accuracy.max_new_tokens", at_least(1)),
    Requires(
        "dataset.__class__",
        Values(lambda kind, _: issubclass(kind, ConversationSettings), lambda _: "a data set of qwen3vl_bridge"),
        _GENERATES, why="its processor encodes the questions",
    ),
    # optimizers of emerging-optimizers
    Requires(
        "optimizer.optimizer", one_of("adam", "sgd", "lion", "muon", "dist_muon"),
        why="megatron-core 0.19 cannot build, step or save others with emerging-optimizers 0.3",
    ),
    *requires_default(_USE_FSDP, "the optimizer needs full matrices, which Megatron-FSDP shards", _EMERGING),
    *requires_default(
        "ddp.use_distributed_optimizer optimizer.use_distributed_optimizer",
        "each rank has the summed gradients of only a shard, but the optimizer would update full matrices",
        _EMERGING,
    ),
    *requires_default("optimizer.optimizer_cpu_offload", IGNORED, _EMERGING),
    Requires("optimizer.bf16", True, _EMERGING & _is_layer_wise, why="megatron-core 0.19 supports only bfloat16"),
    # length of the run and learning rate; Megatron-Bridge's defaults are None, and megatron-core compares numbers
    Requires("train.global_batch_size", at_least(1)),
    Requires("train.train_iters", Values(lambda steps, _: steps is None or steps > 0, lambda _: "1 or more")),
    *(
        Requires(name, Values(lambda value, _: value is not None, lambda _: "a number, such as 0.0"))
        for name in ("optimizer.lr", "optimizer.min_lr", "scheduler.start_weight_decay", "scheduler.end_weight_decay")
    ),
    Requires("scheduler.lr_warmup_fraction", Values(lambda x, _: x is None or x < 1, lambda _: "less than 1")),
    lambda cfg: microbatches_per_rank(cfg, cfg.get_data_parallel_size(get_world_size_safe())),
    check_balance,
    Requires("guard.spike_factor", Values(lambda x, _: x > 1, lambda _: "more than 1"), lambda cfg: cfg.guard),
    Requires("guard.spike_window", at_least(2), lambda cfg: cfg.guard),
    *(
        Requires(name, False, _SKIPS_NAN, why="it ends the run before the step could be skipped")
        for name in _ENDS_RUN_ON_NAN
    ),
    _warn_about_nan_checks,
)  # fmt: skip

# --- When training begins, also if the configuration is Megatron-Bridge's own `ConfigContainer` ---


def _check_learning_rates(cfg: Any) -> None:
    """Raise ValueError if a component's learning rate contradicts another setting or would have no effect."""
    # Only `Qwen3VLLearningRates` has `rates`. Its module imports this one, so the class cannot be imported here.
    rates, optimizer = getattr(cfg.optimizer_config_override_provider, "rates", dict)(), cfg.optimizer
    if not rates:
        return
    if cfg.peft is not None:
        raise ValueError(f"{_RATES} sets learning rates, but with peft only adapters are trained: set them to None")
    if not optimizer.lr or (optimizer.min_lr or 0.0) > optimizer.lr:
        raise ValueError(
            f"optimizer.lr is {optimizer.lr} and optimizer.min_lr {optimizer.min_lr}: expected a positive lr that "
            "is at least min_lr. The learning rates of components decay by the same ratio"
        )
    frozen = {component for component in Component if getattr(cfg.model, f"freeze_{component.value}", False)}
    for component, rate in rates.items():
        name = f"{_RATES}.{component.value}_lr"
        if rate <= 0:
            raise ValueError(
                f"{name} is {rate}, expected more than 0; to freeze it, set model.freeze_{component.value}"
            )
        if rate < (start := cfg.scheduler.lr_warmup_init):
            raise ValueError(f"{name} is {rate}, expected at least scheduler.lr_warmup_init, {start}")
        if component in frozen:
            raise ValueError(f"{name} is {rate}, expected None with model.freeze_{component.value}")
    if all(rates.get(component, optimizer.lr) != optimizer.lr for component in Component if component not in frozen):
        raise ValueError(
            f"{_RATES} sets a learning rate for every trained component, and optimizer.lr, {optimizer.lr}, would be "
            f"ignored; set optimizer.lr to one of {sorted(set(rates.values()))}"
        )


def _replica_counts_differ(model: Any) -> bool:
    replicas = dist_train_replicas(model)
    return replicas.vision != replicas.language


_TOWER_READS_ROWS = Condition(
    "model.dist_train.vision_world_size model.dist_train.language_world_size",
    lambda cfg: _DIST_TRAIN(cfg) and _replica_counts_differ(cfg.model),
)

RUN_CAN_START: tuple[Check, ...] = (
    _check_learning_rates,
    Requires(
        "logger.wandb_project", one_of(None, ""), not_installed("wandb"),
        why="wandb is not installed: pip install wandb",
    ),
    Requires(
        "logger.wandb_exp_name", Values(lambda name, _: name != "", lambda _: "a name for the run, or None"),
        is_on("logger.wandb_project"),
    ),
    *requires_default("optimizer.optimizer_cuda_graph", "a captured optimizer step cannot be skipped"),
    Requires(
        "checkpoint.dist_ckpt_optim_fully_reshardable", True,
        _DIST_TRAIN & is_on("checkpoint.save") & is_on("checkpoint.save_optim")
        & is_on("optimizer.use_distributed_optimizer"),
        why="other formats name tensors by the number of their parameter group, and both modules use the same numbers",
    ),
    *requires_default(
        "train.iterations_to_skip", "vision ranks cannot skip iterations", _TOWER_READS_ROWS, also=(None, ())
    ),
    Requires(
        "dataset.__class__", Qwen3VLConversationProvider, _TOWER_READS_ROWS,
        why="vision ranks read its rows by index",
    ),
)  # fmt: skip

# Run after RUN_CAN_START, but not in a dry run, which may be on another machine.
ON_THIS_MACHINE: tuple[Check, ...] = (
    *requires_default(
        "optimizer.optimizer_cpu_offload",
        "parameters are on the host already: there is no GPU",
        lambda _: not torch.cuda.is_available(),
    ),
)

# --- After Megatron-Bridge has completed a configuration ---

# Fields of sections that neither Megatron-Bridge's training loop nor this package reads.
IGNORED_BY_SECTION: dict[str, str] = {
    "train": "step_batch_size_schedule gpu_sniff_test_interval exit_signal_handler_for_training",
    "validation": "test_mode full_validation multiple_validation_sets validation_set_names",
    "scheduler": "no_weight_decay_cond_type",
    "checkpoint": "save_params_interval save_activations_interval save_tokens_per_expert_interval save_wgrads_interval "
    "save_dgrads_interval use_checkpoint_args use_mp_args_from_checkpoint_args auto_detect_ckpt_format "
    "use_tokenizer_model_from_checkpoint_args ckpt_convert_format ckpt_convert_save verify_integrity "
    "ckpt_convert_update_legacy_dist_opt_format async_ckpt_use_cpu_shm ckpt_fully_parallel_load_exchange_algo "
    "ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group stream_ckpt_dequant "
    "ckpt_load_validate_sharding_integrity dist_ckpt_save_pre_mcore_014",
    "logger": "log_memory_interval log_device_memory_used log_num_zeros_in_grad log_max_attention_logit "
    "barrier_with_L1_time moe_routing_trace_path moe_routing_trace_max_training_iters "
    "moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights",
    "straggler": "enable_straggler_on_startup",
    "inprocess_restart": "max_iterations progress_watchdog_interval",
    "tokenizer": "vocab_extra_ids",
    "mixed_precision": "fp32 autocast_enabled",
}

# Switch -> fields of the same section that have an effect only if the switch is on.
DEPENDENTS_BY_SWITCH: dict[str, str] = {
    "ddp.use_megatron_fsdp": "gradient_reduce_div_fusion suggested_communication_unit_size keep_fp8_transpose_cache "
    "fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync "
    "outer_dp_sharding_strategy fsdp_manual_registration megatron_fsdp_grad_comm_dtype megatron_fsdp_cuda_graph_mode "
    "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer",
    "optimizer.decoupled_lr": "decoupled_min_lr",
    "optimizer.optimizer_cpu_offload": "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
    "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
    "checkpoint.non_persistent_ckpt_type": "non_persistent_save_interval non_persistent_global_ckpt_dir "
    "non_persistent_local_ckpt_dir",
    "checkpoint.also_save_hf_checkpoint": "hf_distributed_save hf_save_every_n_ranks",
    "checkpoint.replication": "replication_jump replication_factor",
    "logger.wandb_project": "wandb_exp_name wandb_save_dir wandb_entity",
    "logger.mlflow_experiment": "mlflow_run_name mlflow_tracking_uri mlflow_tags mlflow_description",
    "logger.comet_project": "comet_experiment_name comet_workspace comet_api_key comet_tags",
}

_NOT_READ = "the training loop does not read it"


def _check_choices(cfg: Any) -> None:
    """Raise ValueError if the value of a setting is not one of the values in its `Literal` type.

    Megatron would reject most such values only late in a run.
    """
    sections = "train scheduler checkpoint logger tokenizer dist rerun_state_machine objective accuracy guard"
    for section in sections.split():
        owner = getattr(cfg, section)
        for name, hint in (get_type_hints(type(owner)) if owner is not None else {}).items():
            kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            literals = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
            choices, found = sum(literals, ()), getattr(owner, name)
            only_literals = literals and len(literals) == len(kinds) - (NoneType in kinds)
            if only_literals and found not in (None, *choices):
                raise ValueError(f"{section}.{name} is {found!r}, expected one of {choices}")


def _check_host_memory(cfg: Any) -> None:
    """Raise ValueError if the host has too little memory to save optimizer states in the fully reshardable format."""
    settings = cfg.checkpoint
    gathers = settings.save_optim and settings.dist_ckpt_optim_fully_reshardable
    if not (gathers and settings.save and settings.ckpt_format == "torch_dist" and torch.cuda.is_available()):
        return
    world = get_world_size_safe()
    try:
        saving = estimate_run(cfg, world).peak_while_saving
    except ValueError:  # the planner does not support the run
        return
    ranks, available, needed = min(world, torch.cuda.device_count()), host_bytes(), saving.host_total
    if saving.host_gathered and ranks * needed > available:
        raise ValueError(
            f"saving a checkpoint takes {needed / GIB:.1f} GiB of host memory on each of {ranks} ranks, and this "
            f"machine has {available / GIB:.1f} GiB: set checkpoint.dist_ckpt_optim_fully_reshardable=False. "
            f"Then it takes {saving.host_written / GIB:.1f} GiB a rank, but the run can be resumed only with the same "
            "TP, PP and EP"
        )


def _warn_about_disk_space(cfg: Any) -> None:
    """Warn if the disk lacks space for the checkpoints that a run keeps and for the one being written."""
    settings = cfg.checkpoint
    if get_rank_safe() != 0 or not settings.save or settings.save_interval == 0 or "://" in str(settings.save):
        return
    try:
        size = checkpoint_bytes(cfg)
    except ValueError:  # the planner does not support the run
        return
    folder, (saves, kept) = Path(settings.save), count_checkpoints(cfg)
    number = max(1, min(saves, kept + 1) - len(list(folder.glob("iter_*"))))
    available = free_space(folder / "iter")
    if number * size > available:
        logger.warning(
            "checkpoint.save is %s, whose disk has %s free, expected about %s: for %d checkpoints of %s, "
            "including the one that is being written. Free disk space, or lower checkpoint.most_recent_k (%s), or set "
            "checkpoint.save_optim=false, but then the run cannot be resumed",
            *(settings.save, in_bytes(available), in_bytes(number * size), number, in_bytes(size)),
            settings.most_recent_k,
        )


def _check_callbacks(cfg: Any) -> None:
    """Raise ValueError if settings need callbacks, but no callbacks were created for this configuration."""
    needs = {
        "guard": cfg.guard is not None,
        "accuracy.path": cfg.accuracy.path is not None,
        "model.dist_train.use_dist_train": cfg.model.dist_train.use_dist_train,
    }
    if not cfg.has_callbacks and (ignored := [name for name, is_set in needs.items() if is_set]):
        raise ValueError(
            f"{' and '.join(ignored)} would be ignored: no callbacks were created for this configuration. Call "
            "finetune(cfg, qwen3vl_bridge.forward_step, callbacks=qwen3vl_bridge.training_callbacks(cfg))"
        )


def _check_trained(cfg: Any) -> None:
    """Raise ValueError if all components are frozen and there are no adapters: the run would train nothing."""
    names = [f"model.freeze_{component.value}" for component in Component]
    frozen = all(getattr(cfg.model, name.removeprefix("model.")) for name in names)
    if frozen and cfg.peft is None and not cfg.validation.skip_train:
        raise ValueError(f"{', '.join(names)} are all True: nothing would be trained; set one to False, or set peft")


_NVRX = "it needs the package nvidia-resiliency-ext, which is not installed"
# The hook that loads initial weights fills a model on the meta device, and Megatron-FSDP then moves it to GPUs.
_ON_META = is_on("model.init_model_with_meta_device")
ON_META_DEVICE: tuple[Check, ...] = (
    Requires("ddp.use_megatron_fsdp", True, _ON_META),
    *requires_default("model.tensor_model_parallel_size", "", _ON_META),
    Requires("checkpoint.pretrained_checkpoint", Values(lambda path, _: path, lambda _: "a checkpoint"), _ON_META),
    Requires("checkpoint.custom_manager_class", MANAGER, _ON_META),
)

_PACKS = Condition("dataset.pack", lambda cfg: isinstance(cfg.dataset, ConversationSettings) and cfg.dataset.pack)

AFTER_VALIDATE: tuple[Check, ...] = (
    lambda cfg: run_checks(model_validation.MODEL_CAN_TRAIN, cfg.model),
    *(
        row
        for section, names in IGNORED_BY_SECTION.items()
        for row in requires_default(names, _NOT_READ, section=f"{section}.", also=(None,))
    ),
    *requires_default_while_off(DEPENDENTS_BY_SWITCH),
    # checkpoints
    *requires_default(
        "checkpoint.async_save", _NVRX,
        equals("checkpoint.ckpt_format", "fsdp_dtensor") & not_installed("nvidia_resiliency_ext"),
    ),
    Requires("checkpoint.non_persistent_ckpt_type", one_of(None, "global", "local")),
    Requires(
        "checkpoint.non_persistent_ckpt_type", one_of(None, "global"), not_installed("nvidia_resiliency_ext"), why=_NVRX
    ),
    *requires_default(
        "checkpoint.save_retain_interval", f"{_NOT_READ}; checkpoint.most_recent_k sets how many checkpoints are kept"
    ),
    Requires(
        "checkpoint.most_recent_k", Values(lambda number, _: number != 0, lambda _: "at least 1, or -1 to keep all")
    ),
    Requires(
        "checkpoint.ckpt_format", one_of("torch_dist", "fsdp_dtensor"), _saves_or_loads,
        why="a run cannot resume from other formats",
    ),
    *requires_default(  # when saving, megatron-core expects a wrapper that a float32 model does not have
        "checkpoint.save",
        "the model is in float32, which Megatron-FSDP can train but not save; or set mixed_precision, such as "
        "'bf16_mixed'",
        _FSDP & equals("checkpoint.ckpt_format", "fsdp_dtensor") & is_off("model.bf16") & is_off("model.fp16"),
    ),
    _check_host_memory,
    lambda cfg: check_checkpoint_exists(cfg.checkpoint),
    *ON_META_DEVICE,
    # settings that the training loop does not support
    *requires_default(
        "tokenizer.chat_template tokenizer.chat_template_path",
        "conversations are formatted by the chat template of dataset.hf_processor_path",
        lambda cfg: isinstance(cfg.dataset, ConversationSettings) and isinstance(cfg.tokenizer, TokenizerConfig),
    ),
    *requires_default(
        "logger.log_l2_norm_grad_to_tensorboard",
        "it would fail, or write the norms of one rank's gradient shards; grad-norm and qwen3vl/grad_norm_* are "
        "written without it",
    ),
    *requires_default("model.log_max_attention_logit", "the training loop does not log it"),
    *requires_default("dist.eval_context_parallel_size", "evaluation uses the process groups of training"),
    *requires_default("dist.lazy_mpu_init", "the training loop needs process groups before it builds the model"),
    *(
        Requires(name, 1, _PACKS, why="make the rows longer instead")
        for name in ("train.micro_batch_size", "validation.eval_micro_batch_size")
    ),
    # Megatron-FSDP
    *requires_default("model.pipeline_model_parallel_size", "Megatron-FSDP does not support pipeline stages", _FSDP),
    Requires(
        "ddp.data_parallel_sharding_strategy", one_of("optim_grads_params", "optim_grads", "optim"),
        _FSDP & is_above("model.expert_model_parallel_size", 1),
        why="each rank's gradient norm would contain its own experts only, so ranks would clip differently",
    ),
    # optimizer
    *requires_default(
        "optimizer.use_distributed_optimizer",
        "megatron-core's distributed optimizer, which Megatron-FSDP uses too, does not support SGD",
        equals("optimizer.optimizer", "sgd"),
    ),
    *requires_default(
        "optimizer.optimizer_cpu_offload",
        "megatron-core cannot build the shard of a float32 parameter that a rank steps on the host",
        _FLOAT32,
    ),
    *requires_default(
        "optimizer.optimizer_cpu_offload",
        "Megatron-Bridge copies loaded weights only into a distributed optimizer",
        is_off("optimizer.use_distributed_optimizer"),
    ),
    _warn_about_rounding,
    Requires(
        "optimizer.use_precision_aware_optimizer", True,
        is_on("optimizer.optimizer_cpu_offload")
        & (lambda cfg: (cfg.checkpoint.save and cfg.checkpoint.save_optim) or cfg.checkpoint.load),
        why="the run could not resume: otherwise megatron-core cannot load optimizer states on the host",
    ),
    *requires_default("optimizer.optimizer_cpu_offload", "Megatron-FSDP does not support it", _FSDP),
    *requires_default(
        "optimizer.overlap_param_gather_with_optimizer_step",
        "it needs interleaved pipeline stages: set model.virtual_pipeline_model_parallel_size",
        lambda cfg: cfg.model.virtual_pipeline_model_parallel_size in (None, 1),
    ),
    Requires("optimizer.lr", at_least(0)),
    Requires(
        "optimizer.min_lr",
        Values(lambda rate, cfg: 0 <= rate <= cfg.optimizer.lr, lambda cfg: f"0 to optimizer.lr, {cfg.optimizer.lr}"),
    ),
    _check_choices,
    lambda cfg: isinstance(cfg.peft, Qwen3VLAdapters) and cfg.peft.check(cfg.model),
    lambda cfg: microbatches_per_rank(cfg, cfg.data_parallel_size),
    *RUN_CAN_START,
    _check_trained,
    _check_callbacks,
    _warn_about_disk_space,
)  # fmt: skip
