"""Resume a run: find its checkpoint, and check optimizer state, schedule and random states before loading."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.dcp import METADATA, read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron import RUN_CONFIG, TORCH_DIST, find_iteration, format_of
from qwen3vl_bridge.core.collectives import broadcast_object, gather_objects, is_rank_zero, raise_on_all_ranks
from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.upstream.checkpoint_files import non_persistent_folders
from qwen3vl_bridge.weights.rows import Component, expand

from megatron.bridge.training.checkpointing import (
    CheckpointLoadContext,
    get_rng_state,
)
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists, is_hf_checkpoint_dir, read_run_config
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.utils import unwrap_model

logger = logging.getLogger(__name__)

_RNG_STATE = "rng_state"
_NEW_OPTIMIZER = "checkpoint.load_optim=false, to start with a new optimizer state"
_MTP, _TABLE_DTYPE = "mtp_loss_scaling_factor", "ngram_table_dtype"
_GROUPS, _IS_EXPERT = "param_groups", "is_expert_parallel"
_GROUP_IDENTITY = tuple(key for key in param_group_identifier_keys if key != _IS_EXPERT)
_CHOOSE_SCHEDULE = (
    "set scheduler.override_opt_param_scheduler=true to use the settings, or "
    "scheduler.use_checkpoint_opt_param_scheduler=true to use the checkpoint's schedule"
)

# megatron-core's message if the schedule differs from the checkpoint's; it counts in samples.
_SCHEDULE_DIFFERS = re.compile(
    r"OptimizerParamScheduler: class input value (\S+) and checkpoint ?value (\S+) for (.*) do not match"
)
_SCHEDULE_SETTINGS = {
    "warmup iterations": "scheduler.lr_warmup_iters",
    "total number of iterations": "train.train_iters (or scheduler.lr_decay_iters)",
    "total number of weight decay iterations": "train.train_iters",
    "learning rate decay style": "scheduler.lr_decay_style",
    "start weight decay": "scheduler.start_weight_decay",
    "end weight decay": "scheduler.end_weight_decay",
    "weight decay incr style": "scheduler.weight_decay_incr_style",
}


def has_checkpoint(settings: CheckpointConfig) -> bool:
    """Return True if a checkpoint of this run exists, to resume from. All ranks must call this together."""
    exists = False
    with raise_on_all_ranks():
        if is_rank_zero():
            exists = _checkpoint_exists(settings)
    return broadcast_object(exists)


def _checkpoint_exists(settings: CheckpointConfig) -> bool:
    return (
        checkpoint_exists(settings.load)
        or is_hf_checkpoint_dir(settings.load)  # Megatron-Bridge then raises
        or any(map(checkpoint_exists, _non_persistent_folders(settings)))
    )


def _non_persistent_folders(settings: CheckpointConfig) -> tuple[str, ...]:
    """Return the folders that may contain non-persistent checkpoints; empty unless their type is "global"."""
    return non_persistent_folders(settings) if settings.non_persistent_ckpt_type == "global" else ()


def check_checkpoint_exists(settings: CheckpointConfig) -> None:
    """Raise CheckpointError if `exit_on_missing_checkpoint` is set and there is no checkpoint.

    Megatron-Bridge reads the setting only if it has found a checkpoint. Each rank checks by itself, because process
    groups do not exist yet.
    """
    local = settings.non_persistent_ckpt_type == "local"  # each rank stores local checkpoints in a folder of its own
    if settings.exit_on_missing_checkpoint and settings.load and not local and not _checkpoint_exists(settings):
        raise CheckpointError(
            f"checkpoint.load is {settings.load}, which contains no checkpoint. Set it to a folder with a "
            "checkpoint, or set checkpoint.exit_on_missing_checkpoint=false"
        )


def folder_to_load(settings: CheckpointConfig) -> Path | None:
    """Return the folder of the checkpoint that Megatron-Bridge loads, or None for a remote checkpoint.

    This is the newest checkpoint. A non-persistent checkpoint is preferred to a persistent one of the same step.
    """
    load = settings.load
    non_persistent = () if load and Path(load, METADATA).is_file() else _non_persistent_folders(settings)
    folders = [find_iteration(Path(path)) for path in non_persistent if Path(path).is_dir() and checkpoint_exists(path)]
    if load and Path(load).is_dir() and checkpoint_exists(load):
        folders.append(find_iteration(Path(load), settings.ckpt_step))
    return max(folders, key=lambda folder: int(re.sub(r"\D", "", folder.name) or 0), default=None)


def check_table_dtype(folder: Path, cfg: ConfigContainer) -> None:
    """Raise CheckpointError if a checkpoint stores n-gram tables in another dtype than the run's model has."""
    if cfg.peft is not None or not hasattr(cfg.model, _TABLE_DTYPE):  # adapters are stored without tables
        return
    found = (read_run_config(str(folder / RUN_CONFIG)).get("model") or {}).get(_TABLE_DTYPE)
    if found != (expected := getattr(cfg.model, _TABLE_DTYPE)):
        raise CheckpointError(
            f"model.{_TABLE_DTYPE} is {expected}, the checkpoint {folder} has {found}: use its setting, or start a new "
            "run with checkpoint.pretrained_checkpoint, which loads tables of either dtype"
        )


def check_optimizer_state(folder: Path, cfg: ConfigContainer) -> None:
    """Check that a checkpoint contains the optimizer state that a run needs, before anything is loaded.

    megatron-core loads the state of every trained parameter. If a state is missing, it fails while loading, with a list
    of all names in the checkpoint. The state of a parameter that is no longer trained is ignored. But if a distributed
    optimizer has saved states by index (`dist_ckpt_optim_fully_reshardable` false), the trained parameters must be the
    same.

    Raises:
        CheckpointError: The state does not fit the run; the message says what to set.
    """
    if cfg.checkpoint.finetune or not cfg.checkpoint.load_optim or not (folder / RUN_CONFIG).is_file():
        return
    saved = read_run_config(str(folder / RUN_CONFIG))
    checkpoint, theirs, ours = saved.get("checkpoint") or {}, saved.get("model") or {}, vars(cfg.model)
    if not checkpoint.get("save_optim", True):
        raise CheckpointError(
            f"{folder} was saved without optimizer state (checkpoint.save_optim=false): set {_NEW_OPTIMIZER}"
        )
    if cfg.peft is not None:
        return
    by_index = (
        checkpoint.get("ckpt_format") == TORCH_DIST
        and not checkpoint.get("dist_ckpt_optim_fully_reshardable")
        and bool((saved.get("optimizer") or {}).get("use_distributed_optimizer"))
    )
    before, now = _trained(theirs), _trained(ours)
    if names := [name for name in now if now[name] > before[name] or (by_index and now[name] != before[name])]:
        differ = ", ".join(f"model.{name} is {ours.get(name)}, the checkpoint has {theirs.get(name)}" for name in names)
        why = "does not have the state of parameters that are trained now"
        if by_index:
            why = "was saved by index, and fits only the same trained parameters"
        raise CheckpointError(
            f"{differ}: the optimizer state in {folder} {why}. Use the checkpoint's settings, or set {_NEW_OPTIMIZER}"
        )
    rows = tuple(row for row in family(cfg.model.family).rows() if row.float32)
    if by_index and now[f"freeze_{Component.LANGUAGE_MODEL.value}"] and rows:
        tensors = read_metadata(folder).tensors
        for name in (row.megatron for row in expand(rows, cfg.model.dimensions())):
            if name in tensors and tensors[name][0].dtype != "float32":
                raise CheckpointError(
                    f"{folder} stores {name} in 16 bits, as Megatron-Bridge's own model does, but this run trains it "
                    f"in float32. The optimizer state was saved by index and does not fit: set {_NEW_OPTIMIZER}"
                )


def _trained(model: Mapping[str, Any]) -> dict[str, bool]:
    """Return a dict with the value True for each component that is trained, and False for the others.

    The key of a component is its setting, such as `freeze_vision_model`. Multi-token prediction has the key
    `mtp_loss_scaling_factor`. `model` maps settings of the model to values.
    """
    parts = {f"freeze_{component.value}": not model.get(f"freeze_{component.value}") for component in Component}
    mtp = bool(model.get("mtp_num_layers") and model.get(_MTP))
    return parts | {_MTP: mtp and parts[f"freeze_{Component.LANGUAGE_MODEL.value}"]}


@contextlib.contextmanager
def temporarily_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object inside the `with` block, and restore it afterwards."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if had else delattr(owner, name)


def load_chained_or_flat_state(optimizer: MegatronOptimizer | None) -> contextlib.AbstractContextManager[None]:
    """Let an optimizer load a state saved by a different number of chained optimizers, inside the `with` block.

    Only with expert parallelism, megatron-core creates a separate optimizer for experts. A checkpoint then stores the
    settings of parameter groups (rates, decay, steps) by optimizer index, and otherwise without an index. Without this
    conversion a run could not resume after expert parallelism was turned on or off.
    """
    if optimizer is None:
        return contextlib.nullcontext()
    load = optimizer.load_state_dict

    def load_state_dict(state: dict) -> None:
        chain = getattr(optimizer, "chained_optimizers", [optimizer])
        if "param_groups" in state and not any(group["params"] for part in chain for group in part.param_groups):
            # Everything on this stage is frozen. Empty states are not saved, but megatron-core expects one.
            state = {"state": {}, **state}
        load(convert_optimizer_state(state, chain))

    return temporarily_set(optimizer, "load_state_dict", load_state_dict)


def convert_optimizer_state(state: dict, chain: Sequence[MegatronOptimizer]) -> dict:
    """Return the loaded state of an optimizer in the form that the chained optimizers in `chain` expect.

    megatron-core expects the state of several optimizers by optimizer index, and the state of a single optimizer
    without an index. Tensors are loaded in the expected form. Settings of parameter groups are loaded in the form in
    which they were saved. If that is the expected form, the state is returned unchanged.
    """
    by_index = {key: value for key, value in state.items() if isinstance(key, int)}
    flat = {key: value for key, value in state.items() if key not in by_index}
    if not (by_index and flat):
        return state
    if len(chain) == 1:
        return _add_settings(flat, list(by_index.values()), chain[0].param_groups)
    return {i: _add_settings(own, [flat], chain[i].param_groups) for i, own in by_index.items()}


def _add_settings(own: Mapping, saved: list[dict], groups: list[dict]) -> dict:
    """Return the state `own` of an optimizer, with missing values filled in from saved states.

    The settings of a parameter group may be in any of the states in `saved`.
    """
    merged = dict(own)
    for key in {key: None for settings in saved for key in settings}:
        theirs = [settings[key] for settings in saved if key in settings]
        if key == _GROUPS:
            slots = own.get(key) or [{} for _ in groups]
            stored = [group for several in theirs for group in several]
            merged[key] = [_saved_group(group, stored) | slot for group, slot in zip(groups, slots, strict=True)]
        elif isinstance(theirs[0], dict):
            merged[key] = _add_settings(own.get(key, {}), theirs, groups)
        else:
            merged.setdefault(key, theirs[0])
    return merged


def _saved_group(group: dict, stored: list[dict]) -> dict[str, Any]:
    """Return the saved settings of a parameter group.

    If there are none, return an empty dict, which megatron-core rejects.
    """

    def identity(group: Mapping) -> tuple:  # megatron-core's keys, except for the key that marks experts
        return tuple(group.get(key, group.get(f"pre_{key}")) for key in _GROUP_IDENTITY)

    same = next((other for other in stored if identity(other) == identity(group)), None)
    return {} if same is None else same | {_IS_EXPERT: group[_IS_EXPERT]}


@contextlib.contextmanager
def use_chosen_schedule(ctx: CheckpointLoadContext, folder: Path | None) -> Iterator[None]:
    """Let optimizer and schedule be loaded inside the `with` block even if learning rates differ from the checkpoint's.

    megatron-core finds a parameter group in a checkpoint by its learning rates and other settings, and fails if they
    differ. The run continues with its own rates if `override_opt_param_scheduler` is True, and with the checkpoint's if
    `use_checkpoint_opt_param_scheduler` is True. A collective call.

    Raises:
        CheckpointError: The rates differ, and neither setting is True.
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
        _replace_rates(ctx, ours, theirs)
    try:
        yield
    except AssertionError as error:  # raised by megatron-core if schedules differ
        if (found := _SCHEDULE_DIFFERS.search(str(error))) is None:
            raise
        our, their, name = found.groups()
        unit = ""
        if name.endswith("iterations") and cfg.train.train_samples is None:
            rows = cfg.train.global_batch_size
            our, their, unit = f"{int(our) / rows:g}", f"{int(their) / rows:g}", f", in steps of {rows} rows"
        raise CheckpointError(
            f"the learning-rate schedule differs from the checkpoint's: {_SCHEDULE_SETTINGS.get(name, name)} is {our}, "
            f"the checkpoint has {their}{unit}; {_CHOOSE_SCHEDULE}"
        ) from None
    if differ and scheduler.override_opt_param_scheduler:
        _replace_rates(ctx, theirs, ours)
        scheduler.step(increment=0)


def _replace_rates(ctx: CheckpointLoadContext, before: tuple, after: tuple) -> None:
    for part in getattr(ctx.optimizer, "chained_optimizers", [ctx.optimizer]):
        for group in part.param_groups:
            if (group.get("max_lr"), group.get("min_lr")) == before:
                group["max_lr"], group["min_lr"] = after


def has_all_rng_states(settings: CheckpointConfig, ctx: CheckpointLoadContext) -> bool:
    """Return True if a checkpoint contains the random states of all ranks of this rank's module. A collective call.

    Random states are stored by pipeline stage and tensor-parallel rank, and with expert parallelism also by
    data-parallel rank. Megatron-Bridge compares only pipeline and tensor-parallel sizes, and megatron-core raises if a
    state is missing. So after a change of the expert- or data-parallel size, a model with experts can resume only
    without random states. Then log a warning, except for separate vision ranks, which draw no random numbers.
    """
    folder, stored = None, None
    with raise_on_all_ranks():
        if is_rank_zero():
            folder = folder_to_load(settings)
            if folder and format_of(folder) == TORCH_DIST:  # only this format stores states by rank
                stored = {key for key in read_metadata(folder).byte_items if key.startswith(_RNG_STATE)}
    folder, stored = broadcast_object((folder, stored))
    if stored is None:
        return True
    groups, init = get_pg_collection(unwrap_model(ctx.model)), ctx.state.cfg.rng.data_parallel_random_init
    wanted = get_rng_state(init, TORCH_DIST, pg_collection=groups, module_name=ctx.module_name).unique_key
    keys = gather_objects((ctx.module_name, wanted))
    missing = sorted(key for name, key in keys if name is None and key not in stored)
    if missing and is_rank_zero():
        layouts = sorted({_sizes_in(key) for key in stored if key.startswith(f"{_RNG_STATE}/")})
        logger.warning(
            "%s has random states for %s, and this run has %s: random states are not restored, and generators start "
            "from rng.seed",
            *(folder, " and ".join(layouts) or "no ranks", _sizes_in(missing[0])),
        )
    return all(key in stored for name, key in keys if name == ctx.module_name)


def _sizes_in(key: str) -> str:
    """Return the parallel sizes that the checkpoint key of a rank's random states contains, as text for messages."""
    sizes = key.rpartition("_")[2].split(".")
    return ", ".join(f"{name} {size}" for name, size in zip(("PP", "TP", "DP with EP"), sizes, strict=False))
