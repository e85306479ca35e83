"""Checkpoints in Megatron-Bridge's own loop: its own saving and loading, through its checkpoint manager.

What lives here: the case of nothing to load, adapters that differ from the checkpoint's or between layers, random
states that do not fit the run, setting the manager. What may not: initial weights
(`training/checkpointing/initial_weights.py`), modules on separate ranks (`dist_train/joint_checkpoint.py`), an
optimizer's settings and state (`training/checkpointing/optimizer_groups.py`, `optimizer_states.py`), moving a finished
folder to its place (`training/checkpointing/megatron_bridge_saves.py`), files other than tensors
(`training/checkpointing/side_files.py`).

Megatron-Bridge's set-up calls the manager's `load` if a run has a checkpoint, or initial weights, which have been read
by then.

Random states are stored by a rank's position: by pipeline stage and tensor-parallel rank, and under expert parallelism
by data-parallel rank too. Megatron-Bridge compares only the first two sizes, and megatron-core ends a run that asks for
a missing one; so a model with experts can resume with another expert- or data-parallel size only without them.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.adapters.settings import check_same_adapters
from qwen3vl_bridge.checkpoint.formats.dcp.metadata import FILE as METADATA
from qwen3vl_bridge.checkpoint.formats.dcp.metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron.folder import (
    RUN_CONFIG,
    TORCH_DIST,
    find_iteration,
    format_of,
    iteration_folder,
)
from qwen3vl_bridge.dist_train.joint_checkpoint import as_one_model
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.parallel.collectives import broadcast_object, gather_objects
from qwen3vl_bridge.peft.lora import Qwen3VLParts
from qwen3vl_bridge.training.checkpointing.all_or_none import all_or_none, is_first
from qwen3vl_bridge.training.checkpointing.megatron_bridge_saves import is_staged, staged_save
from qwen3vl_bridge.training.checkpointing.optimizer_groups import loads_either_form
from qwen3vl_bridge.training.checkpointing.optimizer_states import expect_optimizer
from qwen3vl_bridge.training.checkpointing.saving_process import signals_blocked, start_saving_process
from qwen3vl_bridge.training.checkpointing.schedules import chosen_schedule
from qwen3vl_bridge.training.checkpointing.side_files import expect_data, write_side_files
from qwen3vl_bridge.training.checkpointing.weight_loading import Pretrained

from megatron.bridge.training.checkpointing import (
    CheckpointLoadContext,
    CheckpointSaveContext,
    DefaultCheckpointManager,
    _get_global_non_persistent_checkpoint_dirs,
    _has_global_non_persistent_checkpoint,
    get_rng_state,
)
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.training.utils.checkpoint_utils import (
    checkpoint_exists,
    is_hf_checkpoint_dir,
    read_run_config,
    read_train_state,
)
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import unwrap_model

logger = logging.getLogger(__name__)

_LOCAL = "local_checkpoint_manager"
_RANDOM = "rng_state"


class Qwen3VLCheckpointManager(DefaultCheckpointManager):
    """Megatron-Bridge's manager, without loading initial weights, and with modules on separate ranks treated as one
    model.
    """

    def __init__(self, checkpoint_config: CheckpointConfig) -> None:
        """Prepare for saving, before a model is built.

        Args:
            checkpoint_config: the run's.

        Raises:
            RuntimeError: a script whose process for saving would train.
        """
        super().__init__(checkpoint_config)
        self._origin: Pretrained | None = None
        self._looked = False
        by_itself = checkpoint_config.save is not None and not checkpoint_config.async_save
        if by_itself and checkpoint_config.ckpt_format == TORCH_DIST:
            start_saving_process()

    def save(self, ctx: CheckpointSaveContext, callback_manager: Any) -> None:
        """Save a checkpoint completely or not at all, if it is finished when this returns.

        Args:
            ctx: Megatron-Bridge's.
            callback_manager: Megatron-Bridge's.

        Raises:
            CheckpointError: a rank could not write.
        """
        cfg = ctx.state.cfg
        with _as_one_model(ctx) as whole, _layers_may_differ(ctx), signals_blocked():
            if not is_staged(ctx):
                super().save(whole, callback_manager)
                self._write_side_files(iteration_folder(Path(cfg.checkpoint.save), ctx.state.train_state.step), ctx)
                return
            origin = self._origin_of(cfg)
            keep = None if origin is None else origin.folder
            with staged_save(whole, callback_manager, keep) as folder:
                super().save(whole, None)
                self._write_side_files(folder, ctx)

    def _write_side_files(self, folder: Path, ctx: CheckpointSaveContext) -> None:
        """Write side files if there is a folder for them: non-persistent or remote checkpoints have none."""
        with all_or_none():
            if is_first() and folder.is_dir() and not ctx.non_persistent_ckpt:
                hf = None if ctx.state.cfg.checkpoint.also_save_hf_checkpoint else self._origin_of(ctx.state.cfg)
                write_side_files(folder, ctx.state.cfg, hf)

    def _origin_of(self, cfg: ConfigContainer) -> Pretrained | None:
        """Source of the Hugging Face files in the run's checkpoints: initial weights, or the checkpoint it resumed
        from.
        """
        if not self._looked and (first := cfg.checkpoint.pretrained_checkpoint) and Path(first).is_dir():
            self._origin = Pretrained.find(first)
        self._looked = True
        return self._origin

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, int]:
        """Load the run's own checkpoint, if it has one.

        Args:
            ctx: Megatron-Bridge's.

        Returns:
            The step to resume from, and the FLOPs done so far.

        Raises:
            CheckpointError: a schedule or adapters that differ from the checkpoint's.
            ValueError: data that differ from the run's.
        """
        settings, is_local = self.checkpoint_config, _LOCAL in self.checkpointing_context
        if not has_checkpoint(settings) and not is_local:
            return 0, 0
        # Megatron-Bridge caches files by name, and changes cached values: if a process has resumed from this run
        # before, that old checkpoint would be loaded again as if it were the newest.
        for kept in (read_run_config, read_train_state):
            kept.cache_clear()
        folder = None if is_local else _folder_to_load(settings)
        _check_adapters(folder, ctx)
        if folder is not None and ctx.optimizer is not None:
            with all_or_none():
                expect_optimizer(folder, ctx.state.cfg)
        with (
            _as_one_model(ctx) as whole,
            _layers_may_differ(ctx),
            _random_states_that_fit(settings, whole, is_local),
            loads_either_form(whole.optimizer),
            chosen_schedule(whole, folder),
        ):
            loaded = super().load(whole)
        if folder is not None:
            with all_or_none():
                cfg, done = ctx.state.cfg, ctx.state.train_state
                if not settings.finetune:
                    expect_data(folder, cfg, int(done.consumed_train_samples))
                if not cfg.checkpoint.pretrained_checkpoint:
                    self._origin = Pretrained(folder, is_hf=False)
        return loaded


def _as_one_model(ctx: Any) -> contextlib.AbstractContextManager[Any]:
    return as_one_model(ctx) if ctx.state.cfg.model.dist_train.use_dist_train else contextlib.nullcontext(ctx)


def _check_adapters(folder: Path | None, ctx: CheckpointLoadContext) -> None:
    """Refuse to continue with other adapters than the checkpoint's: tensors of another scale would fit. A collective
    call.

    Megatron-Bridge's own classes of adapters are left to Megatron-Bridge.
    """
    peft = ctx.state.cfg.peft
    with all_or_none():
        if folder is not None and (folder / RUN_CONFIG).is_file() and (peft is None or isinstance(peft, Qwen3VLParts)):
            check_same_adapters(folder, peft)


@contextlib.contextmanager
def _layers_may_differ(ctx: CheckpointSaveContext | CheckpointLoadContext) -> Iterator[None]:
    """Make megatron-core store each layer separately if some have adapters that others lack.

    Otherwise it stacks layers of one name, and refuses to save a stack with missing parts.
    """
    peft, configs = ctx.state.cfg.peft, {}
    if isinstance(peft, Qwen3VLParts) and peft.layers_differ:
        modules = [module for chunk in unwrap_model(ctx.model) for module in chunk.modules()]
        configs = {id(one.config): one.config for one in modules if isinstance(one, TransformerBlock)}
    given = [config.hetereogenous_dist_checkpoint for config in configs.values()]
    for config in configs.values():
        config.hetereogenous_dist_checkpoint = True
    try:
        yield
    finally:
        for config, was in zip(configs.values(), given, strict=True):
            config.hetereogenous_dist_checkpoint = was


MANAGER = f"{Qwen3VLCheckpointManager.__module__}.{Qwen3VLCheckpointManager.__name__}"


def has_checkpoint(settings: CheckpointConfig) -> bool:
    """Whether a run has a checkpoint of its own to resume from, as Megatron-Bridge determines it. A collective call."""
    found = False
    with all_or_none():
        if is_first():
            found = _is_there(settings)
    return broadcast_object(found)


def _is_there(settings: CheckpointConfig) -> bool:
    return (
        checkpoint_exists(settings.load)
        or is_hf_checkpoint_dir(settings.load)  # which Megatron-Bridge then refuses
        or _has_global_non_persistent_checkpoint(settings.load, settings)
    )


def expect_checkpoint(settings: CheckpointConfig) -> None:
    """Apply `exit_on_missing_checkpoint`, which Megatron-Bridge checks only if it has found a checkpoint.

    Args:
        settings: of the run. Each rank checks by itself, because there are no groups yet.

    Raises:
        CheckpointError: there is none to resume from.
    """
    local = settings.non_persistent_ckpt_type == "local"  # each rank keeps it elsewhere
    if settings.exit_on_missing_checkpoint and settings.load and not local and not _is_there(settings):
        raise CheckpointError(
            f"checkpoint.load is {settings.load}, which has no checkpoint; expected one, or "
            "checkpoint.exit_on_missing_checkpoint=false"
        )


@contextlib.contextmanager
def _random_states_that_fit(settings: CheckpointConfig, ctx: CheckpointLoadContext, is_local: bool) -> Iterator[None]:
    """Load random states if a checkpoint has those of every rank of this rank's module; log it if it does not.

    Args:
        settings: changed in place temporarily.
        ctx: of this rank's module.
        is_local: whether ranks keep their own checkpoints, which other ranks do not load.

    Raises:
        CheckpointError, OSError: the checkpoint's states could not be read.
    """
    given = settings.load_rng
    if given and not settings.finetune and not is_local:
        settings.load_rng = _random_states_fit(settings, ctx)
    try:
        yield
    finally:
        settings.load_rng = given


def _random_states_fit(settings: CheckpointConfig, ctx: CheckpointLoadContext) -> bool:
    """Whether they do, equal on every rank of a module. The tower draws no random numbers: nothing is logged for it."""
    folder, stored = None, None
    with all_or_none():
        if is_first():
            folder = _folder_to_load(settings)
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
        found = sorted({_place_sizes(key) for key in stored if key.startswith(f"{_RANDOM}/")})
        logger.warning(
            "%s holds random states for a run split as %s, and this run is split as %s: they are not restored, and "
            "generators keep the state that rng.seed gave them",
            *(folder, " and ".join(found) or "none", _place_sizes(missing[0])),
        )
    return all(key in stored for name, key in heard if name == ctx.module_name)


def _place_sizes(key: str) -> str:
    """Parallel sizes in the key of a rank's random states."""
    sizes = key.rpartition("_")[2].split(".")
    return ", ".join(f"{name} {size}" for name, size in zip(("PP", "TP", "DP with EP"), sizes, strict=False))


def _folder_to_load(settings: CheckpointConfig) -> Path | None:
    """The checkpoint that Megatron-Bridge loads: the newest, if equal the non-persistent one; None for remote ones."""
    load, passing = settings.load, ()
    if settings.non_persistent_ckpt_type == "global" and not (load and Path(load, METADATA).is_file()):
        passing = _get_global_non_persistent_checkpoint_dirs(load, settings)
    folders = [find_iteration(Path(path)) for path in passing if Path(path).is_dir() and checkpoint_exists(path)]
    if load and Path(load).is_dir() and checkpoint_exists(load):
        folders.append(find_iteration(Path(load), settings.ckpt_step))
    return max(folders, key=lambda folder: int(re.sub(r"\D", "", folder.name) or 0), default=None)


def manage_checkpoints(cfg: ConfigContainer) -> None:
    """Set the manager. A user's own is kept.

    Args:
        cfg: changed in place; a second call has no effect.
    """
    if cfg.checkpoint.custom_manager_class is None:
        cfg.checkpoint.custom_manager_class = MANAGER


def is_managed(cfg: ConfigContainer) -> bool:
    """Whether a run's checkpoints are managed by ours."""
    return cfg.checkpoint.custom_manager_class == MANAGER
