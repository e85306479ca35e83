"""What a run refuses beside the model's own refusals: settings of the other sections that would be ignored, fail after
the model is built, or write something wrong.

`Qwen3VLConfigContainer.validate` checks the tables and calls the functions, in a run and in a dry run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from functools import reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qwen3vl_bridge.data.dataset_provider import ConversationRows
from qwen3vl_bridge.data.loading.batch_stream import end_workers_at_exit
from qwen3vl_bridge.models.rules import Row, Rule, When, any_of, at_default, under
from qwen3vl_bridge.planning.from_config import plan_of
from qwen3vl_bridge.planning.hardware import GIB
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.training.checkpoint_manager import MANAGER

import torch
from megatron.bridge.data.builders.energon import EnergonDatasetConfig
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    InProcessRestartConfig,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    StragglerDetectionConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.utils.common_utils import get_world_size_safe

logger = logging.getLogger(__name__)

# Files with a container's memory limit, in the second and the first version of control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

_APART = When("model.dist_train.use_dist_train", lambda cfg: cfg.model.dist_train.use_dist_train)
_SAVED_APART = When(
    _APART.names,
    lambda cfg: _APART.holds(cfg) and (cfg.checkpoint.save is not None or cfg.checkpoint.load is not None),
)
_GROUPS = "each module has its own process groups, all of one kind"
_SHARDS = "it shards the parameters of a single module"

# Requirements of separate vision ranks on settings outside the model's section.
MODULES_APART: tuple[Rule, ...] = (
    *under(
        _APART,
        Row("dist.use_decentralized_pg", True, _GROUPS),
        Row("dist.use_gloo_process_groups", False, _GROUPS),
        Row("ddp.num_distributed_optimizer_instances", 1, _GROUPS),
        Row("dist.use_torch_fsdp2", False, _SHARDS),
        Row("ddp.use_megatron_fsdp", False, _SHARDS),
        Row("dist.use_megatron_fsdp", False, _SHARDS),
        Row("peft", None, "adapters are applied to complete models"),
        Row("accuracy.path", None, "generation needs the complete model"),
        Row(
            "checkpoint.also_save_hf_checkpoint",
            False,
            "the first rank would write only the tower; convert the checkpoint instead",
        ),
        Row("checkpoint.non_persistent_ckpt_type", None, "such runs resume only from persistent checkpoints"),
        Row("rerun_state_machine.rerun_mode", "disabled", "the tower's ranks cannot read their rows a second time"),
    ),
    Row(
        "checkpoint.custom_manager_class",
        None,
        "it would save the random states of both modules under the same names",
        _SAVED_APART,
        also=(MANAGER,),
    ),
)

_TWO_DTYPES = When("model.params_dtype", lambda cfg: cfg.model.params_dtype != torch.float32 and _trains_float32(cfg))
_REDUCED_TOGETHER = When(
    "model.virtual_pipeline_model_parallel_size ddp.use_distributed_optimizer",
    lambda cfg: (
        _TWO_DTYPES.holds(cfg)
        and cfg.model.virtual_pipeline_model_parallel_size
        and not (cfg.ddp.use_distributed_optimizer or cfg.ddp.use_megatron_fsdp)
    ),
)
_GATHERED = "each rank's parameters are gathered in one call, which needs one dtype, and linear attention has float32"
# Requirements of a model in 16 bits that trains some parameters in float32.
WITH_FLOAT32: tuple[Rule, ...] = (
    *under(
        _TWO_DTYPES,
        Row("optimizer.optimizer", any_of("adam", "sgd", "lion", "muon"), _GATHERED),
        Row("optimizer.use_layer_wise_distributed_optimizer", False, _GATHERED),
    ),
    Row(
        "dist.use_torch_fsdp2",
        False,
        "torch's FSDP needs parameters of one dtype, and linear attention has some in float32; use Megatron-FSDP",
        _TWO_DTYPES,
    ),
    Row(
        "ddp.grad_reduce_in_fp32",
        True,
        "gradients of a virtual stage are reduced in one call, which needs one dtype, and linear attention has float32",
        _REDUCED_TOGETHER,
    ),
)


def _trains_float32(cfg: Any) -> bool:
    """Whether parameters that stay in float32 are trained; all are the language model's."""
    trained = cfg.peft is None and not cfg.model.freeze_language_model
    return trained and any(row.float32 for row in family(cfg.model.family).rows())


# Fields of the sections that neither Megatron-Bridge's training loop nor this package reads.
UNREAD: dict[str, tuple[type, str]] = {
    "train": (TrainingConfig, "step_batch_size_schedule gpu_sniff_test_interval exit_signal_handler_for_training"),
    "validation": (ValidationConfig, "test_mode full_validation multiple_validation_sets validation_set_names"),
    "scheduler": (SchedulerConfig, "no_weight_decay_cond_type"),
    "checkpoint": (
        CheckpointConfig,
        "save_params_interval save_activations_interval save_tokens_per_expert_interval save_wgrads_interval "
        "save_dgrads_interval use_checkpoint_args use_mp_args_from_checkpoint_args auto_detect_ckpt_format "
        "use_tokenizer_model_from_checkpoint_args ckpt_convert_format ckpt_convert_save verify_integrity "
        "ckpt_convert_update_legacy_dist_opt_format async_ckpt_use_cpu_shm ckpt_fully_parallel_load_exchange_algo "
        "ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group stream_ckpt_dequant "
        "ckpt_load_validate_sharding_integrity dist_ckpt_save_pre_mcore_014",
    ),
    "logger": (
        LoggerConfig,
        "log_memory_interval log_device_memory_used log_num_zeros_in_grad log_max_attention_logit "
        "barrier_with_L1_time moe_routing_trace_path moe_routing_trace_max_training_iters "
        "moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights",
    ),
    "straggler": (StragglerDetectionConfig, "enable_straggler_on_startup"),
    "inprocess_restart": (InProcessRestartConfig, "max_iterations progress_watchdog_interval"),
    "tokenizer": (TokenizerConfig, "vocab_extra_ids"),
    "mixed_precision": (MixedPrecisionConfig, "fp32 autocast_enabled"),
}

# Fields of something that another setting turns on, by that setting.
PARTS: dict[str, tuple[type, str]] = {
    "ddp.use_megatron_fsdp": (
        DistributedDataParallelConfig,
        "gradient_reduce_div_fusion suggested_communication_unit_size keep_fp8_transpose_cache fsdp_double_buffer "
        "fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync outer_dp_sharding_strategy "
        "fsdp_manual_registration megatron_fsdp_grad_comm_dtype megatron_fsdp_cuda_graph_mode "
        "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer",
    ),
    "optimizer.decoupled_lr": (OptimizerConfig, "decoupled_min_lr"),
    "optimizer.optimizer_cpu_offload": (
        OptimizerConfig,
        "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
        "pin_cpu_params",
    ),
    "checkpoint.non_persistent_ckpt_type": (
        CheckpointConfig,
        "non_persistent_save_interval non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir",
    ),
    "checkpoint.also_save_hf_checkpoint": (CheckpointConfig, "hf_distributed_save hf_save_every_n_ranks"),
    "checkpoint.replication": (CheckpointConfig, "replication_jump replication_factor"),
    "logger.wandb_project": (LoggerConfig, "wandb_exp_name wandb_save_dir wandb_entity"),
    "logger.mlflow_experiment": (
        LoggerConfig,
        "mlflow_run_name mlflow_tracking_uri mlflow_tags mlflow_description",
    ),
    "logger.comet_project": (LoggerConfig, "comet_experiment_name comet_workspace comet_api_key comet_tags"),
}


def _of_kind(section: str, kind: type) -> When:
    return When("", lambda cfg: isinstance(getattr(cfg, section), kind))  # or None, or a name of mixed precision


def _off(switch: str) -> When:
    return When(switch, lambda cfg: not reduce(getattr, switch.split("."), cfg))


# Rows of both.
IGNORED: tuple[Row, ...] = (
    *(
        row
        for section, (kind, names) in UNREAD.items()
        for row in at_default(
            kind,
            names,
            "the training loop does not read it",
            section=f"{section}.",
            when=_of_kind(section, kind),
        ).values()
    ),
    *(
        row
        for switch, (kind, names) in PARTS.items()
        for row in at_default(
            kind,
            names,
            "it would be ignored",
            section=switch.partition(".")[0] + ".",
            when=_off(switch),
        ).values()
    ),
)


def _norms_are_partial(cfg: Any) -> bool:
    """Whether a rank's `main_grad` is not a parameter's whole gradient: it is sharded, or the parameter is."""
    model = cfg.model
    sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.expert_model_parallel_size)
    if cfg.ddp.use_megatron_fsdp or cfg.dist.use_torch_fsdp2 or max(sizes) > 1 or model.dist_train.use_dist_train:
        return True
    return cfg.ddp.use_distributed_optimizer and get_world_size_safe() > 1


_SHARDED = When("ddp.use_megatron_fsdp", lambda cfg: cfg.ddp.use_megatron_fsdp)
_OUR_DATA = When(
    "", lambda cfg: isinstance(cfg.dataset, ConversationRows) and isinstance(cfg.tokenizer, TokenizerConfig)
)


def _needs(package: str, name: str, expected: Any, when: When | None = None) -> Row:
    """A row of a setting that needs a package, which Megatron-Bridge imports around building the model, or later."""
    section = name.split(".")[0]

    def missing(cfg: Any) -> bool:
        unused = getattr(cfg, section) is None or (when is not None and not when.holds(cfg))
        return not unused and importlib.util.find_spec(package) is None

    why = f"it needs the package {package.replace('_', '-')}, which is not installed"
    return Row(name, expected, why, When(when.names if when else "", missing))


_NVRX = "nvidia_resiliency_ext"
_FSDP_DTENSOR = When("checkpoint.ckpt_format", lambda cfg: cfg.checkpoint.ckpt_format == "fsdp_dtensor")


def _check_choices(cfg: Any) -> None:
    """Refuse a value that a field's type does not list. Most are read long after a run has begun."""
    for section in ("train", "scheduler", "checkpoint", "logger", "tokenizer", "dist", "rerun_state_machine"):
        owner = getattr(cfg, section)
        for name, hint in get_type_hints(type(owner)).items():
            kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            lists = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
            choices, found = sum(lists, ()), getattr(owner, name)
            if lists and len(lists) == len(kinds) - (NoneType in kinds) and found not in (None, *choices):
                raise ValueError(f"{section}.{name} is {found!r}, expected one of {choices}")


_LONGER = "make the rows longer instead"

# Checked after Megatron-Bridge has completed a configuration.
COMPLETED: tuple[Rule, ...] = (
    *IGNORED,
    _needs("nvdlfw_inspect", "tensor_inspect.enabled", False),
    _needs(_NVRX, "nvrx_straggler.enabled", False),
    _needs(_NVRX, "ft.enable_ft_package", False),
    _needs(_NVRX, "inprocess_restart.enabled", False),
    _needs(_NVRX, "checkpoint.async_save", False, _FSDP_DTENSOR),
    Row("checkpoint.non_persistent_ckpt_type", any_of(None, "global", "local")),
    _needs(_NVRX, "checkpoint.non_persistent_ckpt_type", any_of(None, "global")),
    *at_default(
        CheckpointConfig,
        "save_retain_interval",
        "the training loop does not read it; checkpoint.most_recent_k sets how many checkpoints are kept",
        section="checkpoint.",
    ).values(),
    *at_default(
        TokenizerConfig,
        "chat_template chat_template_path",
        "conversations are written by the chat template of dataset.hf_processor_path",
        section="tokenizer.",
        when=_OUR_DATA,
    ).values(),
    Row(
        "logger.log_l2_norm_grad_to_tensorboard",
        False,
        "it would write norms of the rank's parts of gradients, or fail; grad-norm and qwen3vl/grad_norm_* are "
        "written without it",
        When("", _norms_are_partial),
    ),
    Row(
        "checkpoint.ckpt_format",
        any_of("torch_dist", "fsdp_dtensor"),
        "the run could not resume from others",
        When("", lambda cfg: cfg.checkpoint.save is not None or cfg.checkpoint.load is not None),
    ),
    Row("model.pipeline_model_parallel_size", 1, "Megatron-FSDP's mesh of ranks has no pipeline stages", _SHARDED),
    Row("model.log_max_attention_logit", False, "the training loop does not log it"),
    *at_default(
        DistributedInitConfig,
        "eval_context_parallel_size",
        "the training loop has no other groups to evaluate with",
        section="dist.",
    ).values(),
    *under(
        When("dataset.pack", lambda cfg: isinstance(cfg.dataset, ConversationRows) and cfg.dataset.pack),
        Row("train.micro_batch_size", 1, _LONGER),
        Row("validation.eval_micro_batch_size", 1, _LONGER),
    ),
    Row("optimizer.optimizer_cuda_graph", False, "no step could be skipped"),
    Row("dist.lazy_mpu_init", False, "the training loop needs its process groups before it builds the model"),
    Row(
        "optimizer.use_distributed_optimizer",
        False,
        "megatron-core's distributed optimizer has no state of SGD; Megatron-FSDP uses it too",
        When("optimizer.optimizer", lambda cfg: cfg.optimizer.optimizer == "sgd"),
    ),
    Row(
        "optimizer.overlap_param_gather_with_optimizer_step",
        False,
        "it gathers between interleaved pipeline stages: set model.virtual_pipeline_model_parallel_size",
        When("", lambda cfg: cfg.model.virtual_pipeline_model_parallel_size in (None, 1)),
    ),
    _check_choices,
)


def check_share(cfg: Any, ranks: int) -> int:
    """The microbatches of each of the data-parallel ranks.

    Raises:
        ValueError: a global batch that is not a multiple of ranks times micro_batch_size.
    """
    rows, share = cfg.train.global_batch_size, cfg.train.micro_batch_size * ranks
    if rows % share:
        raise ValueError(
            f"train.global_batch_size is {rows}, expected a multiple of {share}: train.micro_batch_size times {ranks} "
            "data-parallel ranks"
        )
    return rows // share


def check_balance(cfg: Any) -> None:
    """Refuse rows assigned over several steps: which rows a step has would depend on the number of ranks.

    Raises:
        ValueError: the global batch is not a multiple of `balance_over`, or its size is ramped up.
    """
    if (over := getattr(cfg.dataset, "balance_over", None)) is None:
        return
    rows, ramp = cfg.train.global_batch_size, cfg.train.rampup_batch_size
    if rows % over or ramp is not None:
        ramped = "" if ramp is None else f", rampup_batch_size {ramp}"
        raise ValueError(
            f"dataset.balance_over is {over} with train.global_batch_size {rows}{ramped}, expected the global batch "
            f"size, and that must be constant: set dataset.balance_over={rows} too"
        )


def check_schedule(cfg: ConfigContainer) -> None:
    """Refuse a schedule without start and end values, which are None in Megatron-Bridge and compared by megatron-core;
    and a warm-up that is as long as the schedule, such as a recipe's in a shortened run.

    Megatron-Bridge shortens such a warm-up to one sample less, and the rate reaches `optimizer.lr` in the last step or
    never.

    Raises:
        ValueError: one of them is None, or the warm-up is too long.
    """
    schedule, kind = cfg.scheduler, "iters" if cfg.train.train_samples is None else "samples"
    values = {
        "optimizer.lr": cfg.optimizer.lr,
        "optimizer.min_lr": cfg.optimizer.min_lr,
        "scheduler.start_weight_decay": schedule.start_weight_decay,
        "scheduler.end_weight_decay": schedule.end_weight_decay,
    }
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(
            f"{', '.join(missing)}: found None, expected numbers, such as optimizer.min_lr=0.0 and "
            f"scheduler.start_weight_decay=scheduler.end_weight_decay={cfg.optimizer.weight_decay}"
        )
    lengths = {
        "scheduler.max_steps": schedule.max_steps if kind == "iters" else None,
        f"scheduler.lr_decay_{kind}": getattr(schedule, f"lr_decay_{kind}"),
        f"train.train_{kind}": getattr(cfg.train, f"train_{kind}"),
    }
    name, length = next(((name, value) for name, value in lengths.items() if value is not None), ("", None))
    warmup, wanted = f"scheduler.lr_warmup_{kind}", getattr(schedule, f"lr_warmup_{kind}")
    if schedule.lr_warmup_fraction is not None and schedule.lr_warmup_fraction >= 1:
        raise ValueError(f"scheduler.lr_warmup_fraction is {schedule.lr_warmup_fraction}, expected less than 1")
    if length is not None and wanted >= length > 0 and wanted:
        raise ValueError(
            f"{warmup} is {wanted} with {name} {length}: the learning rate would still be warming up at the end and "
            f"never reach optimizer.lr; expected less than {length}, such as {warmup}={length // 20}, or, for the "
            f"first part of a longer run, that run's length as scheduler.lr_decay_{kind}"
        )


def check_host_memory(cfg: ConfigContainer) -> None:
    """Refuse a run on GPUs whose hosts lack the memory that ranks need to save the optimizer by parameters.

    A run that the planner does not support is not checked.

    Raises:
        ValueError: too little memory.
    """
    settings = cfg.checkpoint
    gathers = (
        settings.dist_ckpt_optim_fully_reshardable and settings.save_optim and settings.ckpt_format == "torch_dist"
    )
    if not (settings.save and gathers and torch.cuda.is_available()):
        return
    world = get_world_size_safe()
    try:
        saving = plan_of(cfg, world).saving
    except ValueError:
        return
    ranks, room = min(world, torch.cuda.device_count()), host_bytes()
    needed = saving.host_total
    if saving.host_gathered and ranks * needed > room:
        raise ValueError(
            f"saving a checkpoint takes {needed / GIB:.1f} GiB of host memory on each of {ranks} ranks, and this "
            f"machine has {room / GIB:.1f} GiB: expected checkpoint.dist_ckpt_optim_fully_reshardable False, with "
            f"which it takes {saving.host_written / GIB:.1f} GiB a rank, and the run can be resumed only with the same "
            "TP, PP and EP"
        )


def host_bytes() -> int:
    """Memory in bytes of this machine, or of the container that this process is in."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file
            room = min(room, int(path.read_text()))
    return room


def leave_exit_signal_to_run(cfg: ConfigContainer) -> None:
    """Let workers of our data sets ignore the signal that asks a run to save and exit, and warn if workers would end a
    run before it can save. A second call has no effect.
    """
    number = int(cfg.train.exit_signal) if cfg.train.exit_signal_handler_for_dataloader else None
    if isinstance(cfg.dataset, ConversationRows):
        cfg.dataset.ignored_signal = number
    if number is not None:
        end_workers_at_exit()  # also those of Megatron-Bridge's own loaders
    if not cfg.train.exit_signal_handler or not getattr(cfg.dataset, "num_workers", 0):
        return
    ends = "launchers send them the signal too, it terminates them, and the run fails before it can save"
    if not cfg.train.exit_signal_handler_for_dataloader:
        logger.warning(
            "train.exit_signal_handler is on, but not for the %d processes that read ahead: %s; set "
            "train.exit_signal_handler_for_dataloader=true, or dataset.num_workers=0",
            *(cfg.dataset.num_workers, ends),
        )
    elif isinstance(cfg.dataset, EnergonDatasetConfig):
        logger.warning(
            "train.exit_signal_handler_for_dataloader has no effect on the loaders of EnergonDatasetConfig: %s; set "
            "dataset.num_workers=0, or use Qwen3VLEnergonProvider",
            ends,
        )
