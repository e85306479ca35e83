"""What a run refuses beside the model's own refusals: settings of the other sections that would be ignored, fail after
the model is built, or write something wrong.
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

from qwen3vl_bridge.data.dataset_provider import ConversationRows, Qwen3VLConversationProvider
from qwen3vl_bridge.models import refusals as model_refusals
from qwen3vl_bridge.models.rules import Allowed, Range, Rule, When, any_of, at_default, at_least, check, under
from qwen3vl_bridge.models.settings import replicas_of
from qwen3vl_bridge.peft.lora import Qwen3VLParts
from qwen3vl_bridge.planning.from_config import plan_of
from qwen3vl_bridge.planning.hardware import GIB
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.training.checkpoint_manager import MANAGER
from qwen3vl_bridge.training.resuming import expect_checkpoint
from qwen3vl_bridge.training.run_settings import Qwen3VLTowers
from qwen3vl_bridge.weights.rows import Part

import torch
from megatron.bridge.training.config import (
    CheckpointConfig,
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
from megatron.core.optimizer.emerging_optimizers import HAVE_EMERGING_OPTIMIZERS

logger = logging.getLogger(__name__)

# Files with a container's memory limit, in the second and the first version of control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_TOWERS = "optimizer_config_override_provider"

# --- Before Megatron-Bridge completes a configuration ---


def _check_lengths(cfg: Any) -> None:
    if cfg.dataset.seq_length != cfg.model.seq_length:
        raise ValueError(
            f"dataset.seq_length is {cfg.dataset.seq_length}, expected model.seq_length, {cfg.model.seq_length}"
        )


_DIST_TRAIN = When("model.dist_train.use_dist_train", lambda cfg: cfg.model.dist_train.use_dist_train)
_GROUPS = "each module has its own process groups, all of one kind"
_SINGLE = "it shards the parameters of a single module"

# Requirements of separate vision ranks on settings outside the model's section.
_MODULES: tuple[Rule, ...] = (
    *under(
        _DIST_TRAIN,
        Allowed("dist.use_decentralized_pg", True, _GROUPS),
        Allowed("dist.use_gloo_process_groups", False, _GROUPS),
        Allowed("ddp.num_distributed_optimizer_instances", 1, _GROUPS),
        Allowed("dist.use_torch_fsdp2", False, _SINGLE),
        Allowed("ddp.use_megatron_fsdp", False, _SINGLE),
        Allowed("dist.use_megatron_fsdp", False, _SINGLE),
        Allowed("peft", None, "adapters are applied to complete models"),
        Allowed("accuracy.path", None, "generation needs the complete model"),
        Allowed(
            "checkpoint.also_save_hf_checkpoint",
            False,
            "the first rank would write only the tower; convert the checkpoint instead",
        ),
        Allowed("checkpoint.non_persistent_ckpt_type", None, "such runs resume only from persistent checkpoints"),
        Allowed("rerun_state_machine.rerun_mode", "disabled", "the tower's ranks cannot read their rows a second time"),
    ),
    Allowed(
        "checkpoint.custom_manager_class",
        None,
        "it would save the random states of both modules under the same names",
        When(
            _DIST_TRAIN.names,
            lambda cfg: _DIST_TRAIN.holds(cfg) and (cfg.checkpoint.save is not None or cfg.checkpoint.load is not None),
        ),
        also=(MANAGER,),
    ),
)


def _trains_float32(cfg: Any) -> bool:
    """Whether parameters of a model in 16 bits that stay in float32 are trained; all are the language model's."""
    trained = cfg.model.params_dtype != torch.float32 and cfg.peft is None and not cfg.model.freeze_language_model
    return trained and any(row.float32 for row in family(cfg.model.family).rows())


_TWO_DTYPES = When("model.params_dtype", _trains_float32)
_GATHERED = "each rank's parameters are gathered in one call, which needs one dtype, and linear attention has float32"
_FLOAT32: tuple[Rule, ...] = (
    *under(
        _TWO_DTYPES,
        Allowed("optimizer.optimizer", any_of("adam", "sgd", "lion", "muon"), _GATHERED),
        Allowed("optimizer.use_layer_wise_distributed_optimizer", False, _GATHERED),
        Allowed(
            "dist.use_torch_fsdp2",
            False,
            "torch's FSDP needs parameters of one dtype, and linear attention has some in float32; use Megatron-FSDP",
        ),
    ),
    Allowed(
        "ddp.grad_reduce_in_fp32",
        True,
        "gradients of a virtual stage are reduced in one call, which needs one dtype, and linear attention has float32",
        When(
            "model.virtual_pipeline_model_parallel_size ddp.use_distributed_optimizer",
            lambda cfg: (
                _TWO_DTYPES.holds(cfg)
                and cfg.model.virtual_pipeline_model_parallel_size
                and not (cfg.ddp.use_distributed_optimizer or cfg.ddp.use_megatron_fsdp)
            ),
        ),
    ),
)


def _check_accuracy(cfg: Any) -> None:
    path, model = cfg.accuracy.path, cfg.model
    if path is None:
        return
    split = {"pipeline": model.pipeline_model_parallel_size, "context": model.context_parallel_size}
    if wrong := [f"{name} parallelism {size}" for name, size in split.items() if size > 1]:
        raise ValueError(
            f"accuracy.path is {path!r} with {' and '.join(wrong)}: generation needs the complete model on each rank, "
            "apart from tensor parallelism; expected accuracy.path None"
        )
    if cfg.dist.use_torch_fsdp2:
        raise ValueError(
            f"accuracy.path is {path!r} with dist.use_torch_fsdp2: generation calls parts of the model, and torch's "
            "FSDP gathers parameters only for a call of the whole model; expected accuracy.path None, or "
            "ddp.use_megatron_fsdp"
        )
    if not isinstance(cfg.dataset, ConversationRows):
        raise ValueError(
            f"accuracy.path is {path!r} with dataset {type(cfg.dataset).__name__}: expected a dataset of "
            "qwen3vl_bridge, whose processor encodes the questions"
        )


_EMERGING = When("optimizer.optimizer", lambda cfg: cfg.optimizer.optimizer not in ("adam", "sgd"))
_LAYER_WISE = When(
    "optimizer.optimizer",
    lambda cfg: (
        _EMERGING.holds(cfg)
        and (cfg.optimizer.optimizer.startswith("dist_") or cfg.optimizer.use_layer_wise_distributed_optimizer)
    ),
)
_PARTIAL = "each rank sums only a part of the gradients, and would step whole matrices"
_WHOLE = "it needs whole matrices"

# Muon and its like.
_OPTIMIZER: tuple[Rule, ...] = (
    Allowed(
        "optimizer.optimizer",
        any_of("adam", "sgd", "lion", "muon", "dist_muon"),
        "megatron-core 0.19 cannot build, step or save others with emerging-optimizers 0.3",
    ),
    *under(
        _EMERGING,
        Allowed("ddp.use_megatron_fsdp", False, _WHOLE),
        Allowed("dist.use_megatron_fsdp", False, _WHOLE),
        Allowed("dist.use_torch_fsdp2", False, _WHOLE),
        Allowed("ddp.use_distributed_optimizer", False, _PARTIAL),
        Allowed("optimizer.use_distributed_optimizer", False, _PARTIAL),
        Allowed("optimizer.optimizer_cpu_offload", False, "it would be ignored"),
        Allowed("optimizer.fp16", False, "megatron-core has no loss scaling for it"),
    ),
    *under(_LAYER_WISE, Allowed("optimizer.bf16", True, "megatron-core 0.19 wraps it only for bfloat16")),
)


def _check_package(cfg: Any) -> None:
    if _EMERGING.holds(cfg) and not HAVE_EMERGING_OPTIMIZERS:
        raise ModuleNotFoundError(
            f"optimizer.optimizer is {cfg.optimizer.optimizer!r}, which needs a package that is not installed: "
            "pip install emerging-optimizers"
        )


def microbatches_of_a_rank(cfg: Any, ranks: int) -> int:
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


def _check_schedule(cfg: Any) -> None:
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


def _check_towers(cfg: Any) -> None:
    """Refuse learning rates of parts that contradict the rest of a configuration, or would have no effect."""
    towers, optimizer = cfg.optimizer_config_override_provider, cfg.optimizer
    if not isinstance(towers, Qwen3VLTowers) or not (rates := towers.rates()):
        return
    if cfg.peft is not None:
        raise ValueError(f"{_TOWERS} sets learning rates of parts: expected none with peft, which trains only adapters")
    if not optimizer.lr or (optimizer.min_lr or 0.0) > optimizer.lr:
        raise ValueError(
            f"optimizer.lr is {optimizer.lr} and optimizer.min_lr {optimizer.min_lr}: expected a positive rate that "
            "is at least min_lr; the parts' learning rates keep this ratio"
        )
    frozen = {part for part in Part if getattr(cfg.model, f"freeze_{part.value}", False)}
    for part, rate in rates.items():
        name = f"{_TOWERS}.{part.value}_lr"
        if rate <= 0:
            raise ValueError(f"{name} is {rate}, expected more than 0; model.freeze_{part.value} freezes a part")
        if rate < (start := cfg.scheduler.lr_warmup_init):
            raise ValueError(f"{name} is {rate}, expected no less than scheduler.lr_warmup_init, {start}")
        if part in frozen:
            raise ValueError(f"{name} is {rate}, expected None with model.freeze_{part.value}")
        if part is Part.LANGUAGE_MODEL and optimizer.decoupled_lr is not None:
            raise ValueError(f"{name} is {rate}, expected None, or optimizer.decoupled_lr None")
    if all(rates.get(part, optimizer.lr) != optimizer.lr for part in Part if part not in frozen):
        raise ValueError(
            f"{_TOWERS}: every trained part has its own learning rate, so optimizer.lr, {optimizer.lr}, would be "
            f"ignored; set it to one of {sorted(set(rates.values()))}"
        )


def _check_guard(cfg: Any) -> None:
    guard = cfg.guard
    if guard is None:
        return
    if guard.spike_factor <= 1:
        raise ValueError(f"guard.spike_factor is {guard.spike_factor}, expected more than 1")
    if guard.spike_window < 2:
        raise ValueError(f"guard.spike_window is {guard.spike_window}, expected 2 or more")
    stops = {
        "rerun_state_machine.check_for_nan_in_loss": cfg.rerun_state_machine.check_for_nan_in_loss,
        "ddp.check_for_nan_in_grad": cfg.ddp.check_for_nan_in_grad,
    }
    names = " and ".join(f"{name}=True" for name, is_set in stops.items() if is_set)
    if names and guard.on_nan == "skip":
        raise ValueError(
            f"guard.on_nan is 'skip' with {names}, which ends the run before the step could be skipped; expected False"
        )
    if names:
        logger.warning("%s ends the run before the guard can name samples; set it to False", names)


BEFORE_VALIDATE: tuple[Rule, ...] = (
    _check_lengths,
    *_MODULES,
    *_FLOAT32,
    lambda cfg: check(model_refusals.GRAPHS, cfg.model),
    Allowed("accuracy.samples", at_least(1)),
    Allowed("accuracy.max_new_tokens", at_least(1)),
    _check_accuracy,
    *_OPTIMIZER,
    _check_package,
    _check_schedule,
    _check_towers,
    lambda cfg: microbatches_of_a_rank(cfg, cfg.get_data_parallel_size(get_world_size_safe())),
    check_balance,
    _check_guard,
)

# --- When training begins, in a run with a configuration of Megatron-Bridge's own class too ---

_TOWER_READS_BY_ITSELF = When(
    "model.dist_train.vision_world_size model.dist_train.language_world_size",
    lambda cfg: _DIST_TRAIN.holds(cfg) and replicas_of(cfg.model).vision != replicas_of(cfg.model).language,
)
ON_TRAIN: tuple[Rule, ...] = (
    _check_towers,
    Allowed("optimizer.optimizer_cuda_graph", False, "no step could be skipped"),
    Allowed(
        "checkpoint.dist_ckpt_optim_fully_reshardable",
        True,
        "other forms name what they save by group number, and both modules have the same numbers",
        When(
            _DIST_TRAIN.names,
            lambda cfg: (
                _DIST_TRAIN.holds(cfg)
                and cfg.checkpoint.save
                and cfg.checkpoint.save_optim
                and cfg.optimizer.use_distributed_optimizer
            ),
        ),
    ),
    *under(
        _TOWER_READS_BY_ITSELF,
        Allowed("train.iterations_to_skip", [], "the tower's ranks cannot skip iterations", also=(None, ())),
        Allowed("dataset.__class__", Qwen3VLConversationProvider, "the tower's ranks read its rows by index"),
    ),
)

# --- After Megatron-Bridge has completed a configuration ---

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
    "logger.mlflow_experiment": (LoggerConfig, "mlflow_run_name mlflow_tracking_uri mlflow_tags mlflow_description"),
    "logger.comet_project": (LoggerConfig, "comet_experiment_name comet_workspace comet_api_key comet_tags"),
}


def _of_kind(section: str, kind: type) -> When:
    return When("", lambda cfg: isinstance(getattr(cfg, section), kind))  # or None, or a name of mixed precision


def _off(switch: str) -> When:
    return When(switch, lambda cfg: not reduce(getattr, switch.split("."), cfg))


# Rows of both.
IGNORED: tuple[Allowed, ...] = (
    *(
        row
        for section, (kind, names) in UNREAD.items()
        for row in at_default(
            kind, names, "the training loop does not read it", section=f"{section}.", when=_of_kind(section, kind)
        ).values()
    ),
    *(
        row
        for switch, (kind, names) in PARTS.items()
        for row in at_default(
            kind, names, "it would be ignored", section=switch.partition(".")[0] + ".", when=_off(switch)
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


def _needs(package: str, name: str, expected: Any, when: When | None = None) -> Allowed:
    """A row of a setting that needs a package, which Megatron-Bridge imports around building the model, or later."""
    section = name.split(".")[0]

    def missing(cfg: Any) -> bool:
        unused = getattr(cfg, section) is None or (when is not None and not when.holds(cfg))
        return not unused and importlib.util.find_spec(package) is None

    why = f"it needs the package {package.replace('_', '-')}, which is not installed"
    return Allowed(name, expected, why, When(when.names if when else "", missing))


_NVRX = "nvidia_resiliency_ext"
_FSDP_DTENSOR = When("checkpoint.ckpt_format", lambda cfg: cfg.checkpoint.ckpt_format == "fsdp_dtensor")


_WITH_CHOICES = (
    *("train", "scheduler", "checkpoint", "logger", "tokenizer", "dist", "rerun_state_machine", "accuracy", "guard"),
)


def _check_choices(cfg: Any) -> None:
    """Refuse a value that a field's type does not list. Most are read long after a run has begun."""
    for section in _WITH_CHOICES:
        owner = getattr(cfg, section)
        for name, hint in (get_type_hints(type(owner)) if owner is not None else {}).items():
            kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            lists = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
            choices, found = sum(lists, ()), getattr(owner, name)
            if lists and len(lists) == len(kinds) - (NoneType in kinds) and found not in (None, *choices):
                raise ValueError(f"{section}.{name} is {found!r}, expected one of {choices}")


def _check_host_memory(cfg: Any) -> None:
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


def check_connections(cfg: Any) -> None:
    """Refuse (ValueError) a variable that containers for Megatron may set, before Megatron-Bridge's assertion of it."""
    if cfg.ddp.use_megatron_fsdp and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "the environment has CUDA_DEVICE_MAX_CONNECTIONS=1, with which Megatron-FSDP's communication would wait "
            "for computation: expected none, or more than 1; `unset CUDA_DEVICE_MAX_CONNECTIONS` on every node"
        )


def host_bytes() -> int:
    """Memory in bytes of this machine, or of the container that this process is in."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file
            room = min(room, int(path.read_text()))
    return room


def _check_adapters(cfg: Any) -> None:
    if isinstance(cfg.peft, Qwen3VLParts):
        cfg.peft.check(cfg.model)


def _check_saved_shards(cfg: Any) -> None:
    """Refuse to save a float32 model under Megatron-FSDP: megatron-core expects one more wrapper around it then."""
    saves = cfg.checkpoint.save is not None and cfg.checkpoint.ckpt_format == "fsdp_dtensor"
    if saves and cfg.ddp.use_megatron_fsdp and not (cfg.model.bf16 or cfg.model.fp16):
        raise ValueError(
            "the model is in float32, which Megatron-FSDP can train but not save: expected a mixed_precision such "
            "as 'bf16_mixed', or checkpoint.save None"
        )


def _check_meta_device(cfg: Any) -> None:
    """Parameters get memory from the hook that reads initial weights, and only Megatron-FSDP moves them to GPUs."""
    if not cfg.model.init_model_with_meta_device:
        return
    weights = cfg.checkpoint.pretrained_checkpoint
    needs = {
        "ddp.use_megatron_fsdp": (cfg.ddp.use_megatron_fsdp, True),
        "model.tensor_model_parallel_size": (cfg.model.tensor_model_parallel_size, 1),
        "checkpoint.pretrained_checkpoint": (weights, weights or "first weights"),
        "checkpoint.custom_manager_class": (cfg.checkpoint.custom_manager_class, MANAGER),
    }
    wrong = [f"{name} is {value!r}, expected {need!r}" for name, (value, need) in needs.items() if value != need]
    if wrong:
        raise ValueError(f"model.init_model_with_meta_device is True, expected False, or: {'; '.join(wrong)}")


AFTER_VALIDATE: tuple[Rule, ...] = (
    lambda cfg: check(model_refusals.ON_TRAIN, cfg.model),
    *IGNORED,
    _needs("nvdlfw_inspect", "tensor_inspect.enabled", False),
    _needs(_NVRX, "nvrx_straggler.enabled", False),
    _needs(_NVRX, "ft.enable_ft_package", False),
    _needs(_NVRX, "inprocess_restart.enabled", False),
    _needs(_NVRX, "checkpoint.async_save", False, _FSDP_DTENSOR),
    Allowed("checkpoint.non_persistent_ckpt_type", any_of(None, "global", "local")),
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
    Allowed(
        "logger.log_l2_norm_grad_to_tensorboard",
        False,
        "it would write norms of the rank's parts of gradients, or fail; grad-norm and qwen3vl/grad_norm_* are "
        "written without it",
        When("", _norms_are_partial),
    ),
    Allowed(
        "checkpoint.ckpt_format",
        any_of("torch_dist", "fsdp_dtensor"),
        "the run could not resume from others",
        When("", lambda cfg: cfg.checkpoint.save is not None or cfg.checkpoint.load is not None),
    ),
    Allowed("model.pipeline_model_parallel_size", 1, "Megatron-FSDP's mesh of ranks has no pipeline stages", _SHARDED),
    Allowed("model.log_max_attention_logit", False, "the training loop does not log it"),
    *at_default(
        DistributedInitConfig,
        "eval_context_parallel_size",
        "the training loop has no other groups to evaluate with",
        section="dist.",
    ).values(),
    *under(
        When("dataset.pack", lambda cfg: isinstance(cfg.dataset, ConversationRows) and cfg.dataset.pack),
        Allowed("train.micro_batch_size", 1, "make the rows longer instead"),
        Allowed("validation.eval_micro_batch_size", 1, "make the rows longer instead"),
    ),
    Allowed("dist.lazy_mpu_init", False, "the training loop needs its process groups before it builds the model"),
    Allowed(
        "optimizer.use_distributed_optimizer",
        False,
        "megatron-core's distributed optimizer has no state of SGD; Megatron-FSDP uses it too",
        When("optimizer.optimizer", lambda cfg: cfg.optimizer.optimizer == "sgd"),
    ),
    Allowed(
        "optimizer.overlap_param_gather_with_optimizer_step",
        False,
        "it gathers between interleaved pipeline stages: set model.virtual_pipeline_model_parallel_size",
        When("", lambda cfg: cfg.model.virtual_pipeline_model_parallel_size in (None, 1)),
    ),
    _check_choices,
    _check_adapters,
    lambda cfg: model_refusals.check_microbatches(
        cfg.model, microbatches_of_a_rank(cfg, cfg.data_parallel_size), "train.global_batch_size"
    ),
    _check_saved_shards,
    _check_host_memory,
    lambda cfg: expect_checkpoint(cfg.checkpoint),
    Allowed(
        "checkpoint.most_recent_k", Range(lambda number, _: number != 0, lambda _: "at least 1, or -1 to keep all")
    ),
    _check_meta_device,
    *ON_TRAIN,
)
