"""Save and load the checkpoints of a run. A save to a local folder is complete or leaves nothing.

Megatron-Bridge writes a checkpoint directly to its final folder, and overwrites an existing checkpoint of the same
step. If a process dies in the middle, an incomplete folder looks like a checkpoint. So this package's manager saves in
three steps:

1. Megatron-Bridge writes to a scratch folder. During this step, `checkpoint.save` is the scratch folder. So everything
   that records this path runs afterwards: writing the configuration, and calling experiment trackers and callbacks.
2. Rank 0 moves the files of the checkpoint from the scratch folder to a hidden folder, the staged folder, and adds this
   package's files.
3. The staged folder is renamed to the final folder (`core/atomic.py`), and the files that name the latest checkpoint
   are replaced.

Three kinds of saves are written by Megatron-Bridge directly, and may leave an incomplete checkpoint: asynchronous
saves, non-persistent checkpoints, and remote checkpoints. Positions in WebDatasets are saved to the run's folder
directly, too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron import HF_FILES, LATEST_TRAIN_STATE, RUN_CONFIG, TRACKER, TRAIN_STATE
from qwen3vl_bridge.checkpoint.stored_models import MANIFEST
from qwen3vl_bridge.config.hf_config import with_scaled_rope
from qwen3vl_bridge.core.atomic import atomic_directory, free_space, replace_file, scratch_folder
from qwen3vl_bridge.core.collectives import (
    barrier,
    broadcast_object,
    error_of_all_ranks,
    is_rank_zero,
    raise_on_all_ranks,
)
from qwen3vl_bridge.core.files import CheckpointError, read_object
from qwen3vl_bridge.data.dataset_provider import ConversationSettings
from qwen3vl_bridge.data.loading import check_position
from qwen3vl_bridge.dist_train.joint_run import merge_split_model
from qwen3vl_bridge.peft.lora import Qwen3VLAdapters
from qwen3vl_bridge.peft.stored_adapters import check_same_adapters
from qwen3vl_bridge.terminal import in_bytes
from qwen3vl_bridge.training.best_checkpoint import record_best
from qwen3vl_bridge.training.resuming import (
    check_optimizer_state,
    check_table_dtype,
    folder_to_load,
    has_all_rng_states,
    has_checkpoint,
    load_chained_or_flat_state,
    temporarily_set,
    use_chosen_schedule,
)
from qwen3vl_bridge.training.run_lock import RunLock, lock_folder
from qwen3vl_bridge.training.weight_loading import ExportFiles, Pretrained
from qwen3vl_bridge.upstream.async_save import is_importing_main_script, results_in_this_process
from qwen3vl_bridge.upstream.saving_state import copy_without_trackers

from megatron.bridge.data.builders.energon import EnergonDatasetConfig
from megatron.bridge.training.callbacks import CallbackContext, should_fire
from megatron.bridge.training.checkpointing import (
    DATALOADER_STATE_SUBDIR,
    CheckpointLoadContext,
    CheckpointSaveContext,
    DefaultCheckpointManager,
    get_checkpoint_name,
)
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.training.utils import comet_utils, mlflow_utils, wandb_utils
from megatron.bridge.training.utils.checkpoint_utils import read_run_config, read_train_state
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException

logger = logging.getLogger(__name__)

RUN_DATA = "run_data.json"
_REMOVED = ".removed"
# Fields of Megatron-Bridge's datasets that do not change samples or their order.
_NOT_ABOUT_ORDER = {
    *("num_workers", "pin_memory", "persistent_workers", "trust_remote_code", "dataloader_save", "dataloader_load"),
    *("do_validation", "do_test", "validation_source", "test_source", "tokenizer"),
}


class Qwen3VLCheckpointManager(DefaultCheckpointManager):
    """Checkpoint manager whose saves are complete or leave nothing; the module's docstring lists the exceptions.

    It saves a vision tower and a language model on separate ranks as one model. It does not load initial weights;
    `weight_loading.InitialWeights` does.

    Raises:
        CheckpointError: The run's folder cannot be written or is in use by another run, or the format of the initial
            weights is unknown.
    """

    def __init__(self, checkpoint_config: CheckpointConfig) -> None:
        super().__init__(checkpoint_config)
        # Held until this object is deleted, after the loop has returned or raised: it still logs after the last step.
        self._lock: RunLock | None = None
        with raise_on_all_ranks():  # fails before the model is built
            if is_rank_zero():
                self._lock = _lock_run_folder(checkpoint_config)
        # Hugging Face files to copy into checkpoints: those of the initial weights or of the checkpoint to resume from.
        self._export: ExportFiles | None = None
        first = checkpoint_config.pretrained_checkpoint
        if checkpoint_config.save is not None and first is not None and Path(first).is_dir():
            with raise_on_all_ranks():
                if is_rank_zero():
                    self._export = Pretrained.find(first).export_files()

    def save(self, ctx: CheckpointSaveContext, callback_manager: Any) -> None:
        """Save a checkpoint. A collective call.

        The save is complete or leaves nothing, unless it is asynchronous, or the checkpoint is non-persistent or
        remote. Megatron-Bridge saves these three kinds directly, and raises its own errors.

        Raises:
            CheckpointError: A rank could not write; existing checkpoints are unchanged.
        """
        state, settings = ctx.state, ctx.state.cfg.checkpoint
        step, folder = state.train_state.step, Path(settings.save)
        final = Path(get_checkpoint_name(settings.save, step))
        writer = contextlib.nullcontext() if settings.async_save else results_in_this_process()
        with _merged_model(ctx) as merged, writer:
            if ctx.non_persistent_ckpt or settings.async_save or "://" in str(settings.save):
                super().save(merged, callback_manager)
                with raise_on_all_ranks():  # non-persistent and remote checkpoints get no side files
                    if is_rank_zero() and final.is_dir() and not ctx.non_persistent_ckpt:
                        self._write_side_files(final, state.cfg)
                return
            with _stage_on_all_ranks(final) as staged:
                # Megatron-Bridge appends the name of the iteration to the folder that it is given, and writes files
                # about the latest checkpoint beside it. The staged folder will be the iteration itself, so
                # Megatron-Bridge writes to a scratch folder, and only the contents of the iteration are kept.
                scratch = scratch_folder(staged)
                super().save(_with_folder(merged, scratch), None)
                with raise_on_all_ranks():
                    if is_rank_zero():
                        written = Path(get_checkpoint_name(str(scratch), step))
                        state.cfg.to_yaml(str(written / RUN_CONFIG))  # Megatron-Bridge's names the scratch folder
                        for path in written.iterdir():
                            path.rename(staged / path.name)
                        shutil.rmtree(scratch)
                        self._write_side_files(staged, state.cfg)
            with raise_on_all_ranks():
                if is_rank_zero():
                    replace_file(folder / LATEST_TRAIN_STATE, (final / TRAIN_STATE).read_bytes())
                    replace_file(folder / TRACKER, str(step).encode())
                    metric = getattr(settings, "keep_best", None)  # Megatron-Bridge's own class lacks it
                    best = record_best(folder, metric, saved_steps(folder)) if metric else None
                    self._remove_older(folder, step, settings.most_recent_k, best)
                    logger.info("saved %s", final)
            _notify_saved(ctx, final, callback_manager)

    def _write_side_files(self, folder: Path, cfg: ConfigContainer) -> None:
        """Write files besides tensors to a checkpoint's folder: a description of the data, and Hugging Face files."""
        _write_json(folder / RUN_DATA, _describe_data(cfg))
        if self._export is None or cfg.checkpoint.also_save_hf_checkpoint:
            return
        for name, path in self._export.files.items():
            (folder / HF_FILES / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / HF_FILES / name)
        if (rope := getattr(cfg.model, "rope_parameters", None)) is not None:  # a run may change RoPE scaling
            path = folder / HF_FILES / "config.json"
            config = read_object(path)
            if (scaled := with_scaled_rope(config, rope)) != config:
                _write_json(path, scaled)
        padding = {"vocab_divisor": cfg.model.make_vocab_size_divisible_by} if cfg.model.should_pad_vocab else {}
        _write_json(folder / MANIFEST, self._export.manifest | padding)

    def _remove_older(self, folder: Path, step: int, most: int | None, best: Path | None) -> None:
        """Remove checkpoints up to `step`. Keep the newest `most`, the best, and the one that the run started from."""
        if most is None or most < 0:
            return
        keep = None if self._export is None else self._export.source
        steps = saved_steps(folder)
        for number in sorted(number for number in steps if number <= step)[:-most]:
            path = steps[number]
            if path != best and (keep is None or not keep.exists() or not path.samefile(keep)):
                # Rename first, so that a partly removed folder does not look like a checkpoint.
                path.rename(path.with_name(f".{path.name}{_REMOVED}"))
                logger.info("removed %s, older than the newest %d", path, most)
        for path in folder.glob(f".iter_*{_REMOVED}"):  # also folders that a killed process has left
            shutil.rmtree(path)

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, int]:
        """Load the run's own checkpoint, if it has one.

        Returns:
            The step to resume from, and the number of FLOPs so far.

        Raises:
            CheckpointError: The learning-rate schedule, the optimizer or the adapters differ from the checkpoint's.
            ValueError: The data settings differ from the checkpoint's.
        """
        settings, is_local = self.checkpoint_config, "local_checkpoint_manager" in self.checkpointing_context
        if not has_checkpoint(settings) and not is_local:
            return 0, 0
        # Megatron-Bridge caches the contents of these files by name, and modifies them. Without this, a process that
        # resumes a run twice would load the older checkpoint again.
        for cached in (read_run_config, read_train_state):
            cached.cache_clear()
        folder, cfg = None if is_local else folder_to_load(settings), ctx.state.cfg
        with raise_on_all_ranks():
            if folder is not None:
                if (folder / RUN_CONFIG).is_file():  # adapters with another scale have the same shapes
                    check_same_adapters(folder, cfg.peft, compare=isinstance(cfg.peft, Qwen3VLAdapters))
                    check_table_dtype(folder, cfg)
                if ctx.optimizer is not None:
                    check_optimizer_state(folder, cfg)
        with (
            _merged_model(ctx) as merged,
            temporarily_set(
                settings,
                "load_rng",
                settings.load_rng and (settings.finetune or is_local or has_all_rng_states(settings, merged)),
            ),
            load_chained_or_flat_state(merged.optimizer),
            use_chosen_schedule(merged, folder),
        ):
            loaded = super().load(merged)
        with raise_on_all_ranks():
            if folder is not None and not settings.finetune:
                _check_data(folder, cfg, int(ctx.state.train_state.consumed_train_samples))
            if folder is not None and not settings.pretrained_checkpoint and is_rank_zero():
                self._export = Pretrained(folder, is_hf=False).export_files()
        return loaded


def saved_steps(folder: Path) -> dict[int, Path]:
    """Return the folder of each checkpoint of a run by its step."""
    return {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"iter_(\d{7,})", path.name))}


def _lock_run_folder(settings: CheckpointConfig) -> RunLock | None:
    """Create and lock the folder of a run, and check that it can be written. Warn if the run saves nothing.

    Returns:
        The lock; None if the run has no local folder.
    """
    if not settings.save or settings.save_interval == 0:
        name = "save_interval" if settings.save else "save"
        logger.warning(
            "checkpoint.%s is %r: the run saves nothing. Set checkpoint.save to a folder that only this run uses. Set "
            "checkpoint.save_interval to a number of steps, or to None to save only at the end",
            *(name, getattr(settings, name)),
        )
    if not settings.save or "://" in str(settings.save):  # remote paths are not folders
        return None
    try:
        Path(settings.save).mkdir(parents=True, exist_ok=True)
        lock = lock_folder(Path(settings.save))
        with tempfile.TemporaryFile(dir=settings.save) as file:
            file.write(bytes(1 << 12))
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.save is {settings.save}, which cannot be written: {error.strerror or error}. Use a "
            "folder with write permission and free disk space"
        ) from error
    return lock


MANAGER = f"{Qwen3VLCheckpointManager.__module__}.{Qwen3VLCheckpointManager.__name__}"


@contextlib.contextmanager
def _stage_on_all_ranks(target: Path) -> Iterator[Path]:
    """Yield a hidden folder next to `target`, and rename it to `target` at the end.

    All ranks may write to it, or to its scratch folder, which is removed at the end.

    The `with` block runs collectives of other packages. If a rank fails between two collectives, it raises at once, and
    the other ranks wait until the launcher ends them. `target` is unchanged then.
    """
    with contextlib.ExitStack() as stack:
        staged = None
        with raise_on_all_ranks():
            if is_rank_zero():
                staged = stack.enter_context(atomic_directory(target, logger.info, check_replaceable=lambda _: True))
        staged = broadcast_object(staged)
        with raise_on_all_ranks():
            if not staged.is_dir():
                raise CheckpointError(
                    f"{staged} is not visible on this rank: set checkpoint.save to a file system that all ranks share"
                )
        try:
            yield staged
        except (CheckpointException, CheckpointError, OSError) as error:
            raise CheckpointError(_save_error_message(target, error)) from error
        barrier()
        with raise_on_all_ranks():
            stack.close()  # renames the folder


def _save_error_message(target: Path, error: BaseException) -> str:
    """Return a message about a failed save: its cause, the free disk space, the latest checkpoint, and what to do.

    torch's own errors do not explain the cause. For a full disk, they say "enforce fail at inline_container.cc" or
    "Worker failure".
    """
    cause = error_of_all_ranks(error) if isinstance(error, CheckpointException) else error
    tracker, resumes = target.parent / TRACKER, "it begins at the first step, because no checkpoint is complete"
    if tracker.is_file():
        resumes = f"it resumes from the checkpoint of step {tracker.read_text().strip()}, which is complete"
    return (
        f"{target} could not be saved: {cause}. The disk had {in_bytes(free_space(target))} free. If the disk is full "
        f"or a quota is used up, free some space. Then start the same command again: {resumes}"
    )


def _with_folder(ctx: CheckpointSaveContext, folder: Path) -> CheckpointSaveContext:
    """Return a copy of a save context with `folder` as the folder of the run.

    A save with this copy removes no older checkpoints and calls no experiment trackers.
    """
    cfg = copy.copy(ctx.state.cfg)
    cfg.checkpoint, cfg.logger, cfg.dataset = copy.copy(cfg.checkpoint), copy.copy(cfg.logger), copy.copy(cfg.dataset)
    cfg.checkpoint.save, cfg.checkpoint.most_recent_k = str(folder), -1
    reads_itself = hasattr(getattr(ctx.train_data_iterator, "iterable", None), "save_state")
    if reads_itself and getattr(cfg.dataset, "dataloader_save", None) is None:
        cfg.dataset.dataloader_save = os.path.join(ctx.state.cfg.checkpoint.save, DATALOADER_STATE_SUBDIR)
    return dataclasses.replace(ctx, state=copy_without_trackers(ctx.state, cfg))


def _notify_saved(ctx: CheckpointSaveContext, final: Path, callback_manager: Any) -> None:
    """Call experiment trackers and callbacks after a save, as Megatron-Bridge does."""
    state, cfg, name = ctx.state, ctx.state.cfg, str(final)
    save, step = cfg.checkpoint.save, state.train_state.step
    wandb_utils.on_save_checkpoint_success(name, save, step, wandb_writer=state.wandb_logger)
    if cfg.logger.mlflow_log_artifacts:
        mlflow_utils.on_save_checkpoint_success(name, save, step, mlflow_logger=state.mlflow_logger)
    comet_utils.on_save_checkpoint_success(name, save, step, comet_logger=state.comet_logger)
    if should_fire(callback_manager, "on_checkpoint_save"):
        model = unwrap_model(ctx.model)
        context = CallbackContext(state, model, callback_manager.user_state, optimizer=ctx.optimizer)
        callback_manager.fire("on_checkpoint_save", context)


def _merged_model(ctx: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext(merge_split_model(ctx) if ctx.state.cfg.model.dist_train.use_dist_train else ctx)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _describe_data(cfg: ConfigContainer) -> dict[str, Any]:
    """Return the settings that determine the order of samples, as values that JSON can represent."""
    if isinstance(cfg.dataset, ConversationSettings):
        return dict(cfg.dataset.position or {})
    fields = {f.name: repr(getattr(cfg.dataset, f.name)) for f in dataclasses.fields(cfg.dataset)}
    identity = {"type": type(cfg.dataset).__name__, **{k: v for k, v in fields.items() if k not in _NOT_ABOUT_ORDER}}
    if cfg.dataset.dataloader_type == "single":  # reads samples in order, independent of the length of the run
        return identity
    # The other types shuffle all samples of the run, within the shard of each rank or over global batches.
    share = dict(dp_size=cfg.data_parallel_size, micro_batch_size=cfg.train.micro_batch_size)
    return identity | share | dict(global_batch_size=cfg.train.global_batch_size, seed=cfg.rng.seed)


def _check_data(folder: Path, cfg: ConfigContainer, row: int) -> None:
    """Raise ValueError if the data settings of a run differ from those of its checkpoint.

    Settings of this package's datasets are not compared here, because the datasets are not built yet. `expect_position`
    stores the checkpoint's settings, and the dataset compares them when it is built.

    Args:
        folder: folder of the checkpoint's iteration.
        row: number of rows that had been read when the checkpoint was saved.
    """
    if row and isinstance(cfg.dataset, EnergonDatasetConfig):
        # Megatron-Bridge 0.6.2 saves no state of its own energon loader, and a missing state is no error when loading.
        states = Path(getattr(cfg.dataset, "dataloader_load", None) or folder.parent / DATALOADER_STATE_SUBDIR)
        if not (states / folder.name).is_dir():
            raise ValueError(
                f"dataset is an EnergonDatasetConfig, and {states} contains no state of its loader for {folder.name}: "
                "the run would read its data from the beginning again. Use a dataset that saves its position in "
                "checkpoints, such as Qwen3VLEnergonProvider; or set checkpoint.finetune=True to start a new run from "
                "these weights"
            )
    if not (folder / RUN_DATA).is_file():
        return
    saved = read_object(folder / RUN_DATA)
    if isinstance(cfg.dataset, ConversationSettings):
        cfg.dataset.expect_position(saved, row)
    else:
        check_position(_describe_data(cfg), saved)


def check_script() -> None:
    """Raise RuntimeError if this process was started for asynchronous saves, but imports the training script again."""
    if is_importing_main_script():
        raise RuntimeError(
            "this process was started to save checkpoints, but imports the training script again: put its code "
            'under `if __name__ == "__main__":`'
        )
