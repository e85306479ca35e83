"""Makes Megatron-Bridge's saves all-or-nothing.

What lives here: making it write to a hidden folder, moving the result to its place, then writing its trackers and
removing older checkpoints. What may not: what it writes; other files of a checkpoint (`side_files.py`).

Megatron-Bridge writes a checkpoint in its final place, and over an existing one of the same step, as when a run was
resumed from before it. A process that dies meanwhile leaves a folder that looks like a checkpoint. So during a save
`checkpoint.save` is a hidden folder, and everything that would contain its name is left out or done afterwards: the
saved configuration, trackers of experiments, the position in WebDatasets' data, callbacks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron.folder import (
    LATEST_TRAIN_STATE,
    RUN_CONFIG,
    TRACKER,
    TRAIN_STATE,
    iteration_folder,
)
from qwen3vl_bridge.files.atomic import PRIVATE, replace_file
from qwen3vl_bridge.training.checkpointing.all_or_none import all_or_none, all_or_none_folder, is_first

from megatron.bridge.training.callbacks import CallbackContext, should_fire
from megatron.bridge.training.checkpointing import DATALOADER_STATE_SUBDIR, CheckpointSaveContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils import comet_utils, mlflow_utils, wandb_utils
from megatron.core.utils import unwrap_model

logger = logging.getLogger(__name__)

_REMOVED = ".removed"
# Loggers of a run's state, and the setting without which it creates none.
_EXPERIMENTS = {
    "_wandb_logger": "wandb_project",
    "_mlflow_logger": "mlflow_experiment",
    "_comet_logger": "comet_project",
}


def is_staged(ctx: CheckpointSaveContext) -> bool:
    """Whether a save is handled here: persistent, synchronous, to a file system.

    Args:
        ctx: Megatron-Bridge's.
    """
    settings = ctx.state.cfg.checkpoint
    return not (ctx.non_persistent_ckpt or settings.async_save or "://" in str(settings.save))


@contextlib.contextmanager
def staged_save(ctx: CheckpointSaveContext, callback_manager: Any, keep: Path | None) -> Iterator[Path]:
    """Let Megatron-Bridge save in the body, without callbacks. A collective call.

    Args:
        ctx: Megatron-Bridge's; its run's settings are changed in the body.
        callback_manager: called when the save is finished.
        keep: a checkpoint that is never removed.

    Yields:
        The folder that becomes the checkpoint, to which more files may be added.

    Raises:
        CheckpointError: a rank could not write; existing checkpoints are unchanged.
    """
    state, step = ctx.state, ctx.state.train_state.step
    folder, most = Path(state.cfg.checkpoint.save), state.cfg.checkpoint.most_recent_k
    final = iteration_folder(folder, step)
    with all_or_none_folder(final) as aside:
        with _saving_to(aside / PRIVATE, ctx):
            yield aside
        with all_or_none():
            if is_first():
                _take_out(aside, step, state.cfg)
    with all_or_none():
        if is_first():
            replace_file(folder / LATEST_TRAIN_STATE, (final / TRAIN_STATE).read_bytes())
            replace_file(folder / TRACKER, str(step).encode())
            _remove_older(folder, step, most, keep)
            logger.info("saved %s", final)
    _announce(ctx, final, callback_manager)


def _take_out(folder: Path, step: int, cfg: ConfigContainer) -> None:
    """Move the files that Megatron-Bridge has written to a subfolder of `folder` up into it."""
    written = iteration_folder(folder / PRIVATE, step)
    cfg.to_yaml(str(written / RUN_CONFIG))  # Megatron-Bridge's file names the hidden folder
    for path in written.iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(folder / PRIVATE)


@contextlib.contextmanager
def _saving_to(folder: Path, ctx: CheckpointSaveContext) -> Iterator[None]:
    """Settings of a run during a save."""
    state, cfg = ctx.state, ctx.state.cfg
    changed: list[tuple[Any, str, Any]] = [
        (cfg.checkpoint, "save", str(folder)),
        (cfg.checkpoint, "most_recent_k", -1),
        *((state, name, None) for name in _EXPERIMENTS),
        *((cfg.logger, setting, None) for setting in _EXPERIMENTS.values()),
    ]
    reads_itself = hasattr(getattr(ctx.train_data_iterator, "iterable", None), "save_state")
    if reads_itself and getattr(cfg.dataset, "dataloader_save", None) is None:
        place = os.path.join(cfg.checkpoint.save, DATALOADER_STATE_SUBDIR)
        changed.append((cfg.dataset, "dataloader_save", place))
    before = [(owner, name, vars(owner).get(name), name in vars(owner)) for owner, name, _ in changed]
    for owner, name, value in changed:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value, had in before:
            setattr(owner, name, value) if had else delattr(owner, name)


def _announce(ctx: CheckpointSaveContext, final: Path, callback_manager: Any) -> None:
    """What Megatron-Bridge does after a checkpoint is complete."""
    state, step = ctx.state, ctx.state.train_state.step
    _log_to_experiments(state, str(final), step)
    if should_fire(callback_manager, "on_checkpoint_save"):
        model = unwrap_model(ctx.model)
        context = CallbackContext(state, model, callback_manager.user_state, optimizer=ctx.optimizer)
        callback_manager.fire("on_checkpoint_save", context)


def _log_to_experiments(state: GlobalState, final: str, step: int) -> None:
    save = state.cfg.checkpoint.save
    wandb_utils.on_save_checkpoint_success(final, save, step, wandb_writer=state.wandb_logger)
    if state.cfg.logger.mlflow_log_artifacts:
        mlflow_utils.on_save_checkpoint_success(final, save, step, mlflow_logger=state.mlflow_logger)
    comet_utils.on_save_checkpoint_success(final, save, step, comet_logger=state.comet_logger)


def _remove_older(folder: Path, step: int, most: int | None, keep: Path | None) -> None:
    """Remove all but the newest checkpoints up to a step."""
    if most is None or most < 0:
        return
    found = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"iter_(\d{7,})", path.name))}
    for number in sorted(number for number in found if number <= step)[:-most]:
        path = found[number]
        if keep is None or not keep.exists() or not path.samefile(keep):
            # Renamed first, so that a partly removed folder is never taken for a checkpoint.
            path.rename(path.with_name(f".{path.name}{_REMOVED}"))
            logger.info("removed %s, older than the newest %d", path, most)
    for path in folder.glob(f".iter_*{_REMOVED}"):  # also those that a killed process left
        shutil.rmtree(path)
