"""What a run refuses beside the model's own refusals: settings of the other sections that would be ignored, fail after
the model is built, or write something wrong.
"""

from __future__ import annotations

import logging
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qwen3vl_bridge.checkpoint.formats.huggingface import copy_of, hub_has, is_path
from qwen3vl_bridge.data.dataset_provider import ConversationRows, Qwen3VLConversationProvider
from qwen3vl_bridge.io.atomic import free_space
from qwen3vl_bridge.models import refusals as model_refusals
from qwen3vl_bridge.models.rules import (
    IGNORED,
    Allowed,
    Range,
    Rule,
    When,
    any_of,
    at_least,
    check,
    dependents,
    equal,
    is_off,
    is_on,
    keep,
    missing,
    same_as,
    suggestion,
    unknown_names,
)
from qwen3vl_bridge.models.settings import replicas_of
from qwen3vl_bridge.peft.lora import Qwen3VLParts
from qwen3vl_bridge.planning.from_config import checkpoint_bytes, checkpoints_of, plan_of
from qwen3vl_bridge.planning.hardware import GIB, host_bytes
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.training.checkpoint_manager import MANAGER
from qwen3vl_bridge.training.resuming import expect_checkpoint
from qwen3vl_bridge.weights.rows import Part

import torch
from megatron.bridge.training.config import TokenizerConfig
from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe
from megatron.core.optimizer.emerging_optimizers import HAVE_EMERGING_OPTIMIZERS

logger = logging.getLogger(__name__)

_RATES = "optimizer_config_override_provider"
_DIST_TRAIN = is_on("model.dist_train.use_dist_train")
_FSDP = is_on("ddp.use_megatron_fsdp")
_STOPS = ("rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad")

# --- Before Megatron-Bridge completes a configuration ---

# Attributes that Megatron sets on sections when it completes them.
_COMPLETED = (
    *("data_parallel_size", "comm_overlap.user_comm_overlap_cfg"),
    "optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8",
)


def check_names(cfg: Any) -> None:
    """Refuse attributes of a run's sections that are no settings, which Python sets without a word. The provider checks
    its own; classes of users may have what they like.
    """

    def inside(prefix: str, owner: Any) -> dict[str, Any]:
        found = {f"{prefix}{field.name}.": getattr(owner, field.name) for field in fields(owner)}
        return {name: one for name, one in found.items() if is_dataclass(one) and name != "model."}

    ours = {"": cfg, **inside("", cfg)}
    ours |= {name: one for prefix, owner in ours.items() if prefix for name, one in inside(prefix, owner).items()}
    packages = ("megatron", "qwen3vl_bridge")
    ours = {name: one for name, one in ours.items() if type(one).__module__.partition(".")[0] in packages}
    known = [prefix + field.name for prefix, owner in ours.items() for field in fields(owner)]
    for prefix, owner in ours.items():
        for name in (prefix + name for name in unknown_names(owner)):
            if name not in _COMPLETED:
                value = getattr(owner, name.removeprefix(prefix))
                raise ValueError(f"{name} is set to {value!r}, but there is no setting {name}{suggestion(name, known)}")


def _check_data_paths(cfg: Any) -> None:
    if isinstance(cfg.dataset, Qwen3VLConversationProvider):
        cfg.dataset.check_paths()


def _check_processor(cfg: Any) -> None:
    """Refuse a processor and a tokenizer of the hub, a recipe's own, beside weights in a local folder that has both, if
    they are not here and the hub does not answer: transformers would try for more than a minute. Warn if it does.
    """
    folder = cfg.checkpoint.pretrained_checkpoint
    if not folder or not all((Path(folder) / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        return
    named = {
        "dataset.hf_processor_path": getattr(cfg.dataset, "hf_processor_path", None),
        "tokenizer.tokenizer_model": getattr(cfg.tokenizer, "tokenizer_model", None),
    }
    named = {name: str(found) for name, found in named.items() if found and not Path(found).exists()}
    for name, found in named.items():
        if is_path(found):
            raise ValueError(f"{name} is {found}: there is no such folder")
    copies = {found: copy_of(found) for found in named.values()}
    named = {name: found for name, found in named.items() if copies[found] != Path(folder)}
    if not named or get_rank_safe() != 0:  # one asks the hub, under torchrun the others end with it
        return
    message = (
        f"{' and '.join(named)} are of the hub, {' and '.join(dict.fromkeys(named.values()))}, and "
        f"checkpoint.pretrained_checkpoint is {folder}, which has its own: expected {folder} for each; in Python "
        f"set_paths(cfg, hf_path={str(folder)!r}) of qwen3vl_recipes.paths sets them and the model"
    )
    if not all(copies[found] or hub_has(found) for found in named.values()):
        raise ValueError(f"{message}; this machine has no copy, and the hub does not answer or has none")
    logger.warning(message)


def _check_connections(cfg: Any) -> None:
    """Refuse a variable that containers for Megatron may set, before Megatron-Bridge's assertion of it."""
    if cfg.ddp.use_megatron_fsdp and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "the environment has CUDA_DEVICE_MAX_CONNECTIONS=1, with which Megatron-FSDP's communication would wait "
            "for computation: expected none, or more than 1; `unset CUDA_DEVICE_MAX_CONNECTIONS` on every node"
        )


def _trains_float32(cfg: Any) -> bool:
    """Whether parameters of a model in 16 bits that stay in float32 are trained; all are the language model's."""
    trained = cfg.model.params_dtype != torch.float32 and cfg.peft is None and not cfg.model.freeze_language_model
    return trained and any(row.float32 for row in family(cfg.model.family).rows())


_TWO_DTYPES = When("model.params_dtype", _trains_float32)
_FLOAT32 = When("model.params_dtype", lambda cfg: cfg.model.params_dtype == torch.float32 or _trains_float32(cfg))
_EMERGING = When("optimizer.optimizer", lambda cfg: cfg.optimizer.optimizer not in ("adam", "sgd"))


def microbatches_of_a_rank(cfg: Any, ranks: int) -> int:
    """The microbatches of each of the data-parallel ranks; raises ValueError if they would differ."""
    rows, share = cfg.train.global_batch_size, cfg.train.micro_batch_size * ranks
    if rows % share:
        raise ValueError(
            f"train.global_batch_size is {rows}, expected a multiple of {share}: train.micro_batch_size times {ranks} "
            "data-parallel ranks"
        )
    return rows // share


def check_balance(cfg: Any) -> None:
    """Refuse rows assigned over several steps (ValueError): which rows a step has would depend on the ranks' number."""
    if (over := getattr(cfg.dataset, "balance_over", None)) is None:
        return
    rows, ramp = cfg.train.global_batch_size, cfg.train.rampup_batch_size
    if rows % over or ramp is not None:
        ramped = "" if ramp is None else f", rampup_batch_size {ramp}"
        raise ValueError(
            f"dataset.balance_over is {over} with train.global_batch_size {rows}{ramped}, expected the global batch "
            f"size, and that must be constant: set dataset.balance_over={rows} too"
        )


def check_warmup(cfg: Any) -> None:
    """Refuse a warm-up that is as long as the schedule; a recipe's in a run shortened on a command line is shortened.

    Megatron-Bridge shortens it to one sample less, and the rate reaches `optimizer.lr` in the last step or never.
    """
    schedule, kind = cfg.scheduler, "iters" if cfg.train.train_samples is None else "samples"
    lengths = {
        "scheduler.max_steps": schedule.max_steps if kind == "iters" else None,
        f"scheduler.lr_decay_{kind}": getattr(schedule, f"lr_decay_{kind}"),
        f"train.train_{kind}": getattr(cfg.train, f"train_{kind}"),
    }
    name, length = next(((name, value) for name, value in lengths.items() if value is not None), ("", 0))
    warmup, wanted = f"scheduler.lr_warmup_{kind}", getattr(schedule, f"lr_warmup_{kind}")
    if wanted and wanted >= length > 0 and getattr(schedule, "_is_the_recipes", False):
        shorter = length // 20
        setattr(schedule, f"lr_warmup_{kind}", shorter)
        if get_rank_safe() == 0:
            logger.info("the recipe's %s of %d is shortened to %d: %s is %d", warmup, wanted, shorter, name, length)
    elif wanted and wanted >= length > 0:
        raise ValueError(
            f"{warmup} is {wanted} with {name} {length}: the learning rate would still be warming up at the end and "
            f"never reach optimizer.lr; expected less than {length}, such as {warmup}={length // 20}, or, for the "
            f"first part of a longer run, that run's length as scheduler.lr_decay_{kind}"
        )


def _warn_of_stops(cfg: Any) -> None:
    for name in _STOPS:
        if cfg.guard is not None and is_on(name)(cfg):
            logger.warning("%s ends the run before the guard can name samples; set it to False", name)


def _warn_of_rounding(cfg: Any) -> None:
    if cfg.optimizer.optimizer_cpu_offload and cfg.checkpoint.load and cfg.checkpoint.load_optim:
        logger.warning(
            "with optimizer.optimizer_cpu_offload a resumed run begins with main weights rounded to the model's dtype: "
            "Megatron-Bridge copies the model's over those it has loaded"
        )


def _saves_or_loads(cfg: Any) -> bool:
    return bool(cfg.checkpoint.save or cfg.checkpoint.load)


def _is_layer_wise(cfg: Any) -> bool:
    return cfg.optimizer.optimizer.startswith("dist_") or cfg.optimizer.use_layer_wise_distributed_optimizer


_SKIPS = When("guard.on_nan", lambda cfg: cfg.guard is not None and cfg.guard.on_nan == "skip")
_GENERATES = is_on("accuracy.path")
QUANTISED = is_on("model.restore_modelopt_state")
_SHARDED = "ddp.use_megatron_fsdp dist.use_megatron_fsdp"
_GROUPS = "each module has its own process groups, all of one kind"
_GATHERED = "each rank's parameters are gathered in one call, which needs one dtype, and linear attention has float32"

# Before Megatron-Bridge writes `comm_overlap` over the model's settings, which is before validation.
BEFORE_OVERLAP: tuple[Rule, ...] = tuple(
    Allowed(f"comm_overlap.{name}", True, is_on(f"model.{name}") & (lambda cfg: cfg.comm_overlap)).because(
        "it replaces the model's, and None turns that off"
    )
    for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "defer_embedding_wgrad_compute")
)
# When a script asks for callbacks, first of all; not in a dry run, whose data and weights need not exist.
BEFORE_RUN: tuple[Rule, ...] = (check_names, _check_data_paths, _check_processor)

BEFORE_VALIDATE: tuple[Rule, ...] = (
    check_names,
    _check_connections,
    Allowed("dataset.seq_length", same_as("model.seq_length")).because(
        "both are the length of a row; set both to the same number"
    ),
    *keep(_SHARDED, "its checkpoints have no quantisers", QUANTISED),
    *keep("dist.use_decentralized_pg", "ModelOpt asks megatron-core for process groups", QUANTISED),
    *keep("dist.use_torch_fsdp2", "it needs parameters of one dtype and whole models; use ddp.use_megatron_fsdp"),
    Allowed("dist.use_decentralized_pg", True, _DIST_TRAIN).because(_GROUPS),
    Allowed("dist.use_gloo_process_groups", False, _DIST_TRAIN).because(_GROUPS),
    *keep("ddp.num_distributed_optimizer_instances", _GROUPS, _DIST_TRAIN),
    *keep(_SHARDED, "it shards the parameters of a single module", _DIST_TRAIN),
    Allowed("peft", None, _DIST_TRAIN).because("adapters are applied to complete models"),
    *keep("accuracy.path", "generation needs the complete model", _DIST_TRAIN),
    *keep(
        "checkpoint.also_save_hf_checkpoint",
        "the first rank would write only the tower; convert the checkpoint instead",
        _DIST_TRAIN,
    ),
    *keep("checkpoint.non_persistent_ckpt_type", "such runs resume only from persistent checkpoints", _DIST_TRAIN),
    *keep("rerun_state_machine.rerun_mode", "the tower's ranks cannot read their rows a second time", _DIST_TRAIN),
    *keep(
        "checkpoint.custom_manager_class",
        "it would save the random states of both modules under the same names",
        _DIST_TRAIN & _saves_or_loads,
        also=(MANAGER,),
    ),
    *keep(
        _SHARDED,
        "the nodes of a layer are called one by one, and parameters would be gathered and freed for whole layers",
        is_on("model.overlap_moe_expert_parallel_comm"),
    ),
    Allowed("ddp.delay_wgrad_compute", True, is_on("model.delay_wgrad_compute")).because(
        "gradients would be reduced before they are computed"
    ),
    Allowed("ddp.delay_wgrad_compute", False, is_off("model.delay_wgrad_compute"), also=(None,)).because(IGNORED),
    Allowed("peft", None, is_on("model.delay_wgrad_compute")).because(
        "gradients of adapters, of experts too, are computed in the backward pass, and those of frozen layers never"
    ),
    Allowed("optimizer.optimizer", any_of("adam", "sgd", "lion", "muon"), _TWO_DTYPES).because(_GATHERED),
    *keep("optimizer.use_layer_wise_distributed_optimizer", _GATHERED, _TWO_DTYPES),
    Allowed(
        "ddp.grad_reduce_in_fp32",
        True,
        is_on("model.virtual_pipeline_model_parallel_size")
        & is_off("ddp.use_distributed_optimizer")
        & is_off("ddp.use_megatron_fsdp")
        & _trains_float32,
    ).because(
        "gradients of a virtual stage are reduced in one call, which needs one dtype, and linear attention has float32"
    ),
    lambda cfg: check(model_refusals.GRAPHS, cfg.model),
    Allowed("accuracy.samples", at_least(1)),
    Allowed("accuracy.max_new_tokens", at_least(1)),
    *keep(
        "model.pipeline_model_parallel_size model.context_parallel_size",
        "generation needs the complete model on each rank, apart from tensor parallelism",
        _GENERATES,
    ),
    Allowed(
        "dataset.__class__",
        Range(lambda kind, _: issubclass(kind, ConversationRows), lambda _: "one of qwen3vl_bridge"),
        _GENERATES,
    ).because("its processor encodes the questions"),
    Allowed("optimizer.optimizer", any_of("adam", "sgd", "lion", "muon", "dist_muon")).because(
        "megatron-core 0.19 cannot build, step or save others with emerging-optimizers 0.3"
    ),
    *keep(_SHARDED, "it needs whole matrices", _EMERGING),
    *keep(
        "ddp.use_distributed_optimizer optimizer.use_distributed_optimizer",
        "each rank sums only a part of the gradients, and would step whole matrices",
        _EMERGING,
    ),
    *keep("optimizer.optimizer_cpu_offload", IGNORED, _EMERGING),
    *keep("optimizer.fp16", "megatron-core has no loss scaling for it", _EMERGING),
    Allowed("optimizer.bf16", True, _EMERGING & _is_layer_wise).because(
        "megatron-core 0.19 wraps it only for bfloat16"
    ),
    Allowed("optimizer.optimizer", any_of("adam", "sgd"), lambda _: not HAVE_EMERGING_OPTIMIZERS).because(
        "others need a package that is not installed: pip install emerging-optimizers"
    ),
    Allowed("train.global_batch_size", at_least(1)),
    Allowed("train.train_iters", Range(lambda steps, _: steps is None or steps > 0, lambda _: "1 or more")),
    # They are None in Megatron-Bridge, and megatron-core compares them.
    *(
        Allowed(name, Range(lambda value, _: value is not None, lambda _: "a number, such as 0.0"))
        for name in ("optimizer.lr", "optimizer.min_lr", "scheduler.start_weight_decay", "scheduler.end_weight_decay")
    ),
    Allowed("scheduler.lr_warmup_fraction", Range(lambda part, _: part is None or part < 1, lambda _: "less than 1")),
    lambda cfg: microbatches_of_a_rank(cfg, cfg.get_data_parallel_size(get_world_size_safe())),
    check_balance,
    Allowed("guard.spike_factor", Range(lambda factor, _: factor > 1, lambda _: "more than 1"), lambda cfg: cfg.guard),
    Allowed("guard.spike_window", at_least(2), lambda cfg: cfg.guard),
    *(Allowed(name, False, _SKIPS).because("it ends the run before the step could be skipped") for name in _STOPS),
    _warn_of_stops,
)

# --- When training begins, in a run with a configuration of Megatron-Bridge's own class too ---


def _check_part_rates(cfg: Any) -> None:
    """Refuse learning rates of parts that contradict the rest of a configuration, or would have no effect."""
    # Those of `Qwen3VLLearningRates`, whose module imports this one; other providers have none.
    rates, optimizer = getattr(cfg.optimizer_config_override_provider, "rates", dict)(), cfg.optimizer
    if not rates:
        return
    if cfg.peft is not None:
        raise ValueError(f"{_RATES} sets learning rates of parts: expected none with peft, which trains only adapters")
    if not optimizer.lr or (optimizer.min_lr or 0.0) > optimizer.lr:
        raise ValueError(
            f"optimizer.lr is {optimizer.lr} and optimizer.min_lr {optimizer.min_lr}: expected a positive rate that "
            "is at least min_lr; the parts' learning rates keep this ratio"
        )
    frozen = {part for part in Part if getattr(cfg.model, f"freeze_{part.value}", False)}
    for part, rate in rates.items():
        name = f"{_RATES}.{part.value}_lr"
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
            f"{_RATES}: every trained part has its own learning rate, so optimizer.lr, {optimizer.lr}, would be "
            f"ignored; set it to one of {sorted(set(rates.values()))}"
        )


_READS_ALONE = When(
    "model.dist_train.vision_world_size model.dist_train.language_world_size",
    lambda cfg: _DIST_TRAIN(cfg) and replicas_of(cfg.model).vision != replicas_of(cfg.model).language,
)

ON_TRAIN_START: tuple[Rule, ...] = (
    _check_part_rates,
    Allowed("logger.wandb_project", any_of(None, ""), missing("wandb")).because(
        "wandb is not installed: pip install wandb"
    ),
    Allowed(
        "logger.wandb_exp_name",
        Range(lambda name, _: name != "", lambda _: "a name for the run, or None"),
        is_on("logger.wandb_project"),
    ),
    *keep("optimizer.optimizer_cuda_graph", "no step could be skipped"),
    Allowed(
        "checkpoint.dist_ckpt_optim_fully_reshardable",
        True,
        _DIST_TRAIN
        & is_on("checkpoint.save")
        & is_on("checkpoint.save_optim")
        & is_on("optimizer.use_distributed_optimizer"),
    ).because("other forms name what they save by group number, and both modules have the same numbers"),
    *keep("train.iterations_to_skip", "the tower's ranks cannot skip iterations", _READS_ALONE, also=(None, ())),
    Allowed("dataset.__class__", Qwen3VLConversationProvider, _READS_ALONE).because(
        "the tower's ranks read its rows by index"
    ),
)

# In addition, not in a dry run, whose machine may lack what the run's has.
ON_THIS_MACHINE: tuple[Rule, ...] = (
    *keep(
        "optimizer.optimizer_cpu_offload",
        "parameters are on the host already: there is no GPU",
        lambda _: not torch.cuda.is_available(),
    ),
)

# --- After Megatron-Bridge has completed a configuration ---

# Fields of the sections that neither Megatron-Bridge's training loop nor this package reads.
UNREAD_BY_SECTION: dict[str, str] = {
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

# Fields of something that another setting turns on, by that setting.
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
    """Refuse a value that a field's type does not list. Most are read long after a run has begun."""
    sections = "train scheduler checkpoint logger tokenizer dist rerun_state_machine accuracy guard"
    for section in sections.split():
        owner = getattr(cfg, section)
        for name, hint in (get_type_hints(type(owner)) if owner is not None else {}).items():
            kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            lists = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
            choices, found = sum(lists, ()), getattr(owner, name)
            if lists and len(lists) == len(kinds) - (NoneType in kinds) and found not in (None, *choices):
                raise ValueError(f"{section}.{name} is {found!r}, expected one of {choices}")


def _check_host_memory(cfg: Any) -> None:
    """Refuse a run on GPUs whose hosts lack the memory that ranks need to save the optimizer by parameters."""
    settings = cfg.checkpoint
    gathers = settings.save_optim and settings.dist_ckpt_optim_fully_reshardable
    if not (gathers and settings.save and settings.ckpt_format == "torch_dist" and torch.cuda.is_available()):
        return
    world = get_world_size_safe()
    try:
        saving = plan_of(cfg, world).saving
    except ValueError:  # the planner does not support the run
        return
    ranks, room, needed = min(world, torch.cuda.device_count()), host_bytes(), saving.host_total
    if saving.host_gathered and ranks * needed > room:
        raise ValueError(
            f"saving a checkpoint takes {needed / GIB:.1f} GiB of host memory on each of {ranks} ranks, and this "
            f"machine has {room / GIB:.1f} GiB: expected checkpoint.dist_ckpt_optim_fully_reshardable False, with "
            f"which it takes {saving.host_written / GIB:.1f} GiB a rank, and the run can be resumed only with the same "
            "TP, PP and EP"
        )


def _warn_of_room(cfg: Any) -> None:
    """Warn of a disk without room for the checkpoints that a run keeps, and the one that it writes meanwhile."""
    settings = cfg.checkpoint
    if get_rank_safe() != 0 or not settings.save or settings.save_interval == 0 or "://" in str(settings.save):
        return
    try:
        each = checkpoint_bytes(cfg)
    except ValueError:  # the planner does not support the run
        return
    folder, (saves, kept) = Path(settings.save), checkpoints_of(cfg)
    number = max(1, min(saves, kept + 1) - len(list(folder.glob("iter_*"))))
    room = free_space(folder / "iter")
    if number * each > room:
        logger.warning(
            "checkpoint.save is %s, whose disk has %.1f GiB free, expected about %.1f GiB: for %d checkpoints of %.1f "
            "GiB, with the one that is being written. Make room, or lower checkpoint.most_recent_k (%s), or set "
            "checkpoint.save_optim=false, and the run cannot be resumed",
            *(settings.save, room / GIB, number * each / GIB, number, each / GIB, settings.most_recent_k),
        )


def _check_callbacks(cfg: Any) -> None:
    """Refuse a run without the callbacks that implement its settings, which would end in its first step."""
    needs = {"guard": cfg.guard is not None, "accuracy.path": cfg.accuracy.path is not None}
    if not cfg._has_callbacks and (ignored := [name for name, is_set in needs.items() if is_set]):
        raise ValueError(
            f"{' and '.join(ignored)} would be ignored: no callbacks were made for this configuration; expected "
            "finetune(cfg, qwen3vl_bridge.forward_step, callbacks=qwen3vl_bridge.training_callbacks(cfg))"
        )


def _check_trained(cfg: Any) -> None:
    """Refuse a run whose parts are all frozen, which would take its steps and save what it was given."""
    names = [f"model.freeze_{part.value}" for part in Part]
    frozen = all(getattr(cfg.model, name.removeprefix("model.")) for name in names)
    if frozen and cfg.peft is None and not cfg.validation.skip_train:
        raise ValueError(
            f"{', '.join(names)} are all True: nothing would be trained; expected one of them False, or peft"
        )


_LACKS_NVRX = missing("nvidia_resiliency_ext")
_NVRX = "it needs the package nvidia-resiliency-ext, which is not installed"
# Parameters get memory from the hook that reads initial weights, and only Megatron-FSDP moves them to GPUs.
_ON_META = is_on("model.init_model_with_meta_device")
WITHOUT_MEMORY: tuple[Rule, ...] = (
    Allowed("ddp.use_megatron_fsdp", True, _ON_META),
    *keep("model.tensor_model_parallel_size", "", _ON_META),
    Allowed("checkpoint.pretrained_checkpoint", Range(lambda path, _: path, lambda _: "first weights"), _ON_META),
    Allowed("checkpoint.custom_manager_class", MANAGER, _ON_META),
)

_PACKS = When("dataset.pack", lambda cfg: isinstance(cfg.dataset, ConversationRows) and cfg.dataset.pack)

AFTER_VALIDATE: tuple[Rule, ...] = (
    lambda cfg: check(model_refusals.ON_TRAIN, cfg.model),
    *(
        row
        for section, names in UNREAD_BY_SECTION.items()
        for row in keep(names, _NOT_READ, section=f"{section}.", also=(None,))
    ),
    *dependents(DEPENDENTS_BY_SWITCH),
    *keep("checkpoint.async_save", _NVRX, equal("checkpoint.ckpt_format", "fsdp_dtensor") & _LACKS_NVRX),
    Allowed("checkpoint.non_persistent_ckpt_type", any_of(None, "global", "local")),
    Allowed("checkpoint.non_persistent_ckpt_type", any_of(None, "global"), _LACKS_NVRX).because(_NVRX),
    *keep(
        "checkpoint.save_retain_interval", f"{_NOT_READ}; checkpoint.most_recent_k sets how many checkpoints are kept"
    ),
    *keep(
        "tokenizer.chat_template tokenizer.chat_template_path",
        "conversations are written by the chat template of dataset.hf_processor_path",
        lambda cfg: isinstance(cfg.dataset, ConversationRows) and isinstance(cfg.tokenizer, TokenizerConfig),
    ),
    *keep(
        "logger.log_l2_norm_grad_to_tensorboard",
        "it would write norms of a rank's parts of gradients, or fail; grad-norm and qwen3vl/grad_norm_* are written "
        "without it",
    ),
    Allowed("checkpoint.ckpt_format", any_of("torch_dist", "fsdp_dtensor"), _saves_or_loads).because(
        "the run could not resume from others"
    ),
    *keep("model.pipeline_model_parallel_size", "Megatron-FSDP's mesh of ranks has no pipeline stages", _FSDP),
    *keep("model.log_max_attention_logit", "the training loop does not log it"),
    *keep("dist.eval_context_parallel_size", "the training loop has no other groups to evaluate with"),
    *(
        Allowed(name, 1, _PACKS).because("make the rows longer instead")
        for name in ("train.micro_batch_size", "validation.eval_micro_batch_size")
    ),
    *keep("dist.lazy_mpu_init", "the training loop needs its process groups before it builds the model"),
    *keep(
        "optimizer.use_distributed_optimizer",
        "megatron-core's distributed optimizer has no state of SGD; Megatron-FSDP uses it too",
        equal("optimizer.optimizer", "sgd"),
    ),
    *keep(
        "optimizer.optimizer_cpu_offload",
        "megatron-core cannot build the part of a float32 parameter that a rank steps on the host",
        _FLOAT32,
    ),
    *keep(
        "optimizer.optimizer_cpu_offload",
        "Megatron-Bridge copies weights that it has read into a distributed optimizer only",
        is_off("optimizer.use_distributed_optimizer"),
    ),
    _warn_of_rounding,
    Allowed(
        "optimizer.use_precision_aware_optimizer",
        True,
        is_on("optimizer.optimizer_cpu_offload")
        & (lambda cfg: (cfg.checkpoint.save and cfg.checkpoint.save_optim) or cfg.checkpoint.load),
    ).because("megatron-core cannot load the states on the host of another, so the run could not resume"),
    *keep("optimizer.optimizer_cpu_offload", "Megatron-FSDP's parameters have no copies on the host", _FSDP),
    *keep(
        "optimizer.overlap_param_gather_with_optimizer_step",
        "it gathers between interleaved pipeline stages: set model.virtual_pipeline_model_parallel_size",
        lambda cfg: cfg.model.virtual_pipeline_model_parallel_size in (None, 1),
    ),
    _check_choices,
    lambda cfg: isinstance(cfg.peft, Qwen3VLParts) and cfg.peft.check(cfg.model),
    lambda cfg: model_refusals.check_microbatches(
        cfg.model, microbatches_of_a_rank(cfg, cfg.data_parallel_size), "train.global_batch_size"
    ),
    # megatron-core expects one more wrapper around a model in float32 then.
    *keep(
        "checkpoint.save",
        "the model is in float32, which Megatron-FSDP can train but not save; or set a mixed_precision such as "
        "'bf16_mixed'",
        _FSDP & equal("checkpoint.ckpt_format", "fsdp_dtensor") & is_off("model.bf16") & is_off("model.fp16"),
    ),
    _check_host_memory,
    lambda cfg: expect_checkpoint(cfg.checkpoint),
    Allowed(
        "checkpoint.most_recent_k", Range(lambda number, _: number != 0, lambda _: "at least 1, or -1 to keep all")
    ),
    *WITHOUT_MEMORY,
    *ON_TRAIN_START,
    _check_trained,
    Allowed("optimizer.lr", at_least(0)),
    Allowed(
        "optimizer.min_lr",
        Range(lambda rate, cfg: 0 <= rate <= cfg.optimizer.lr, lambda cfg: f"0 to optimizer.lr, {cfg.optimizer.lr}"),
    ),
    _check_callbacks,
    _warn_of_room,
)
