"""What a resumed run continues with: which checkpoint, and whether its adapters, optimizer, schedule and random states
fit the run.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.dcp_metadata import FILE as METADATA
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron import RUN_CONFIG, TORCH_DIST, find_iteration, format_of
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.parallel.collectives import broadcast_object, fail_together, gather_objects, is_first
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.rows import Part, expand

from megatron.bridge.training.checkpointing import (
    CheckpointLoadContext,
    _get_global_non_persistent_checkpoint_dirs,
    _has_global_non_persistent_checkpoint,
    get_rng_state,
)
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists, is_hf_checkpoint_dir, read_run_config
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.utils import unwrap_model

logger = logging.getLogger(__name__)

_RANDOM = "rng_state"
_NEW_OPTIMIZER = "checkpoint.load_optim=false, to start with a new optimizer state"
_MTP = "mtp_loss_scaling_factor"
_GROUPS, _OF_EXPERTS = "param_groups", "is_expert_parallel"
_SAME = tuple(key for key in param_group_identifier_keys if key != _OF_EXPERTS)
_CHOOSE_SCHEDULE = (
    "set scheduler.override_opt_param_scheduler=true to use the settings, or "
    "scheduler.use_checkpoint_opt_param_scheduler=true to use the checkpoint's schedule"
)

# What megatron-core says of a schedule that is not the checkpoint's, which it counts in samples.
_DIFFERS = re.compile(
    r"OptimizerParamScheduler: class input value (\S+) and checkpoint ?value (\S+) for (.*) do not match"
)
_OF_SCHEDULE = {
    "warmup iterations": "scheduler.lr_warmup_iters",
    "total number of iterations": "train.train_iters (or scheduler.lr_decay_iters)",
    "total number of weight decay iterations": "train.train_iters",
    "learning rate decay style": "scheduler.lr_decay_style",
    "start weight decay": "scheduler.start_weight_decay",
    "end weight decay": "scheduler.end_weight_decay",
    "weight decay incr style": "scheduler.weight_decay_incr_style",
}


def has_checkpoint(settings: CheckpointConfig) -> bool:
    """Whether a run has a checkpoint of its own to resume from, as Megatron-Bridge determines it. A collective call."""
    exists = False
    with fail_together():
        if is_first():
            exists = _is_there(settings)
    return broadcast_object(exists)


def _is_there(settings: CheckpointConfig) -> bool:
    return (
        checkpoint_exists(settings.load)
        or is_hf_checkpoint_dir(settings.load)  # which Megatron-Bridge then refuses
        or _has_global_non_persistent_checkpoint(settings.load, settings)
    )


def expect_checkpoint(settings: CheckpointConfig) -> None:
    """Apply `exit_on_missing_checkpoint`, which Megatron-Bridge checks only if it has found a checkpoint: raises
    CheckpointError if there is none. Each rank checks by itself, because there are no groups yet.
    """
    local = settings.non_persistent_ckpt_type == "local"  # each rank keeps it elsewhere
    if settings.exit_on_missing_checkpoint and settings.load and not local and not _is_there(settings):
        raise CheckpointError(
            f"checkpoint.load is {settings.load}, which has no checkpoint; expected one, or "
            "checkpoint.exit_on_missing_checkpoint=false"
        )


def folder_to_load(settings: CheckpointConfig) -> Path | None:
    """The checkpoint that Megatron-Bridge loads: the newest, if equal the non-persistent one; None for remote ones."""
    load, passing = settings.load, ()
    if settings.non_persistent_ckpt_type == "global" and not (load and Path(load, METADATA).is_file()):
        passing = _get_global_non_persistent_checkpoint_dirs(load, settings)
    folders = [find_iteration(Path(path)) for path in passing if Path(path).is_dir() and checkpoint_exists(path)]
    if load and Path(load).is_dir() and checkpoint_exists(load):
        folders.append(find_iteration(Path(load), settings.ckpt_step))
    return max(folders, key=lambda folder: int(re.sub(r"\D", "", folder.name) or 0), default=None)


def expect_optimizer(folder: Path, cfg: ConfigContainer) -> None:
    """Check that a checkpoint has the optimizer's state that a run will look for, before anything is loaded.

    megatron-core looks for the state of every trained parameter, and fails in the middle if a checkpoint lacks one,
    with the names of everything in it. The state of parameters that are no longer trained is ignored; but a distributed
    optimizer's state that was saved by index (`dist_ckpt_optim_fully_reshardable` false) fits only the same parameters.

    Raises:
        CheckpointError: it does not; the message says what to set.
    """
    if cfg.checkpoint.finetune or not cfg.checkpoint.load_optim or not (folder / RUN_CONFIG).is_file():
        return
    saved = read_run_config(str(folder / RUN_CONFIG))
    kept, theirs, ours = saved.get("checkpoint") or {}, saved.get("model") or {}, vars(cfg.model)
    if not kept.get("save_optim", True):
        raise CheckpointError(
            f"{folder} was saved without the optimizer (checkpoint.save_optim=false): expected {_NEW_OPTIMIZER}"
        )
    if cfg.peft is not None:
        return
    by_index = (
        kept.get("ckpt_format") == TORCH_DIST
        and not kept.get("dist_ckpt_optim_fully_reshardable")
        and bool((saved.get("optimizer") or {}).get("use_distributed_optimizer"))
    )
    before, now = _trained(theirs), _trained(ours)
    if names := [name for name in now if now[name] > before[name] or (by_index and now[name] != before[name])]:
        lacks = "and lacks the state of parameters that are trained now"
        why = "by index, and fits no other parameters" if by_index else lacks
        said = ", ".join(f"model.{name} is {ours.get(name)}, the checkpoint has {theirs.get(name)}" for name in names)
        raise CheckpointError(
            f"{said}: the optimizer's state in {folder} was saved with the checkpoint's value, {why}; expected the "
            f"checkpoint's settings, or {_NEW_OPTIMIZER}"
        )
    rows = tuple(row for row in family(cfg.model.family).rows() if row.float32)
    if by_index and now[f"freeze_{Part.LANGUAGE_MODEL.value}"] and rows:
        tensors = read_metadata(folder).tensors
        for name in (row.megatron for row in expand(rows, cfg.model.dimensions())):
            if name in tensors and tensors[name][0].dtype != "float32":
                raise CheckpointError(
                    f"{folder} has {name} in 16 bits, as Megatron-Bridge's own model, and this run in float32: the "
                    f"optimizer's state was saved by index, and does not fit; expected {_NEW_OPTIMIZER}"
                )


def _trained(model: Mapping[str, Any]) -> dict[str, bool]:
    """Whether a part is trained, according to the model's settings."""
    parts = {f"freeze_{part.value}": not model.get(f"freeze_{part.value}") for part in Part}
    mtp = bool(model.get("mtp_num_layers") and model.get(_MTP))
    return parts | {_MTP: mtp and parts[f"freeze_{Part.LANGUAGE_MODEL.value}"]}


@contextlib.contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object, or a method of its class, is another one in the body."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if had else delattr(owner, name)


def loads_either_form(optimizer: MegatronOptimizer | None) -> contextlib.AbstractContextManager[None]:
    """Let an optimizer (changed temporarily) load what was saved with another number of optimizers in its chain.

    Only under expert parallelism, megatron-core puts experts' parameters into separate groups with a separate
    optimizer. A checkpoint then has the settings of groups (rates, decay, steps) by the optimizer's index, and
    otherwise without an index, so that a run with experts could not resume from one form in the other.
    """
    if optimizer is None:
        return contextlib.nullcontext()
    load = optimizer.load_state_dict

    def load_state_dict(state: dict) -> None:
        chain = getattr(optimizer, "chained_optimizers", [optimizer])
        if "param_groups" in state and not any(group["params"] for part in chain for group in part.param_groups):
            # All of this stage is frozen: a checkpoint stores nothing for an empty state, and megatron-core asks for
            # it.
            state = {"state": {}, **state}
        load(in_own_form(state, chain))

    return changed(optimizer, "load_state_dict", load_state_dict)


def in_own_form(state: dict, chain: Sequence[MegatronOptimizer]) -> dict:
    """The loaded state of a chain of optimizers, with settings where it looks for them.

    Its tensors are in the chain's own form, by index in a chain of several. Its settings are as they were saved: by
    index too if there were several optimizers, and only then. It is unchanged if both forms are the same.
    """
    numbered = {key: value for key, value in state.items() if isinstance(key, int)}
    whole = {key: value for key, value in state.items() if key not in numbered}
    if not (numbered and whole):
        return state
    if len(chain) == 1:
        return _with_settings(whole, list(numbered.values()), chain[0].param_groups)
    return {i: _with_settings(own, [whole], chain[i].param_groups) for i, own in numbered.items()}


def _with_settings(own: Mapping, saved: list[dict], groups: list[dict]) -> dict:
    """An optimizer's own state, with missing values from the first one that has them; groups from all."""
    merged = dict(own)
    for key in {key: None for settings in saved for key in settings}:
        theirs = [settings[key] for settings in saved if key in settings]
        if key == _GROUPS:
            slots = own.get(key) or [{} for _ in groups]
            stored = [group for several in theirs for group in several]
            merged[key] = [_group_of(group, stored) | slot for group, slot in zip(groups, slots, strict=True)]
        elif isinstance(theirs[0], dict):
            merged[key] = _with_settings(own.get(key, {}), theirs, groups)
        else:
            merged.setdefault(key, theirs[0])
    return merged


def _group_of(group: dict, stored: list[dict]) -> dict[str, Any]:
    """The settings that were saved for a group; empty if there are none, which megatron-core refuses."""

    def identity(group: Mapping) -> tuple:  # of megatron-core's, all but whether the group has experts
        return tuple(group.get(key, group.get(f"pre_{key}")) for key in _SAME)

    same = next((other for other in stored if identity(other) == identity(group)), None)
    return {} if same is None else same | {_OF_EXPERTS: group[_OF_EXPERTS]}


@contextlib.contextmanager
def chosen_schedule(ctx: CheckpointLoadContext, folder: Path | None) -> Iterator[None]:
    """Let a run load its optimizer and schedule in the body, and continue with the rates that the configuration
    chooses. A collective call.

    megatron-core identifies groups of parameters by their maximum and minimum rates, among others. So an optimizer
    finds none of its groups in a checkpoint with other rates, or continues with those of the checkpoint whatever the
    configuration says.

    Raises:
        CheckpointError: both differ, and the configuration does not say which one to use.
    """
    cfg, scheduler = ctx.state.cfg, ctx.opt_param_scheduler
    ours = theirs = cfg.optimizer.lr, cfg.optimizer.min_lr
    if folder is not None and ctx.optimizer is not None and (folder / RUN_CONFIG).is_file():
        saved = read_run_config(str(folder / RUN_CONFIG)).get("optimizer") or {}
        theirs = saved.get("lr", ours[0]), saved.get("min_lr", ours[1])
    loads = cfg.checkpoint.load_optim and not cfg.checkpoint.finetune
    differ = loads and theirs != ours and scheduler is not None
    if differ:
        if not (scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler):
            raise CheckpointError(
                "the learning-rate schedule differs from the checkpoint's: optimizer.lr and optimizer.min_lr are "
                f"{ours}, the checkpoint has {theirs}; {_CHOOSE_SCHEDULE}"
            )
        _rename_rates(ctx, ours, theirs)
    try:
        yield
    except AssertionError as error:  # megatron-core's, that a schedule is the checkpoint's
        if (found := _DIFFERS.search(str(error))) is None:
            raise
        our, their, name = found.groups()
        unit = ""
        if name.endswith("iterations") and cfg.train.train_samples is None:
            rows = cfg.train.global_batch_size
            our, their, unit = f"{int(our) / rows:g}", f"{int(their) / rows:g}", f", in steps of {rows} rows"
        raise CheckpointError(
            f"the learning-rate schedule differs from the checkpoint's: {_OF_SCHEDULE.get(name, name)} is {our}, the "
            f"checkpoint has {their}{unit}; {_CHOOSE_SCHEDULE}"
        ) from None
    if differ and scheduler.override_opt_param_scheduler:
        _rename_rates(ctx, theirs, ours)
        scheduler.step(increment=0)


def _rename_rates(ctx: CheckpointLoadContext, before: tuple, after: tuple) -> None:
    for part in getattr(ctx.optimizer, "chained_optimizers", [ctx.optimizer]):
        for group in part.param_groups:
            if (group.get("max_lr"), group.get("min_lr")) == before:
                group["max_lr"], group["min_lr"] = after


def random_states_fit(settings: CheckpointConfig, ctx: CheckpointLoadContext) -> bool:
    """Whether a checkpoint has the random states of every rank of this rank's module, so that they can be loaded; log
    it if it does not, unless they are the tower's, which draws no random numbers. A collective call.

    They are stored by a rank's position: by pipeline stage and tensor-parallel rank, and under expert parallelism by
    data-parallel rank too. Megatron-Bridge compares only the first two sizes, and megatron-core ends a run that asks
    for a missing one; so a model with experts can resume with another expert- or data-parallel size only without them.
    """
    folder, stored = None, None
    with fail_together():
        if is_first():
            folder = folder_to_load(settings)
            if folder and format_of(folder) == TORCH_DIST:  # otherwise equal on DP ranks
                stored = {key for key in read_metadata(folder).byte_items if key.startswith(_RANDOM)}
    folder, stored = broadcast_object((folder, stored))
    if stored is None:
        return True
    groups, init = get_pg_collection(unwrap_model(ctx.model)), ctx.state.cfg.rng.data_parallel_random_init
    wanted = get_rng_state(init, TORCH_DIST, pg_collection=groups, module_name=ctx.module_name).unique_key
    heard = gather_objects((ctx.module_name, wanted))
    missing = sorted(key for name, key in heard if name is None and key not in stored)
    if missing and is_first():
        splits = sorted({_sizes_in(key) for key in stored if key.startswith(f"{_RANDOM}/")})
        logger.warning(
            "%s holds random states for a run split as %s, and this run is split as %s: they are not restored, and "
            "generators keep the state that rng.seed gave them",
            *(folder, " and ".join(splits) or "none", _sizes_in(missing[0])),
        )
    return all(key in stored for name, key in heard if name == ctx.module_name)


def _sizes_in(key: str) -> str:
    """Parallel sizes in the key of a rank's random states."""
    sizes = key.rpartition("_")[2].split(".")
    return ", ".join(f"{name} {size}" for name, size in zip(("PP", "TP", "DP with EP"), sizes, strict=False))
