"""A run's checkpoints in Megatron-Bridge's loop, through its checkpoint manager; a save is complete or leaves nothing.

Megatron-Bridge writes a checkpoint in its final place, and over an existing one of the same step, as when a run was
resumed from before it. A process that dies meanwhile leaves a folder that looks like a checkpoint. So during a save
`checkpoint.save` is a hidden folder, and everything that would contain its name is left out or done afterwards: the
saved configuration, trackers of experiments, callbacks. Positions in WebDatasets go to their final folder at once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import multiprocessing
import os
import queue
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron import HF_FILES, LATEST_TRAIN_STATE, RUN_CONFIG, TRACKER, TRAIN_STATE
from qwen3vl_bridge.checkpoint.stored_models import MANIFEST
from qwen3vl_bridge.data.dataset_provider import ConversationRows
from qwen3vl_bridge.data.row_loading import check_position
from qwen3vl_bridge.dist_train.joint_run import as_one_model
from qwen3vl_bridge.io.atomic import atomic_directory, free_space, replace_file, scratch_of
from qwen3vl_bridge.io.files import CheckpointError, read_object
from qwen3vl_bridge.models.hf_config import with_scaled_rope
from qwen3vl_bridge.parallel.collectives import broadcast_object, fail_together, is_first, joint_failure, wait_for_all
from qwen3vl_bridge.peft.lora import Qwen3VLParts
from qwen3vl_bridge.peft.stored_adapters import check_same_adapters
from qwen3vl_bridge.planning.hardware import GIB
from qwen3vl_bridge.training.resuming import (
    changed,
    chosen_schedule,
    expect_optimizer,
    folder_to_load,
    has_checkpoint,
    loads_either_form,
    random_states_fit,
)
from qwen3vl_bridge.training.weight_loading import ExportFiles, Pretrained

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
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException

logger = logging.getLogger(__name__)

RUN_DATA = "run_data.json"
_REMOVED = ".removed"
# Loggers of a run's state, and the setting without which it creates none.
_EXPERIMENTS = {
    "_wandb_logger": "wandb_project",
    "_mlflow_logger": "mlflow_experiment",
    "_comet_logger": "comet_project",
}
# Fields of Megatron-Bridge's data sets that do not affect which samples there are, and in which order.
_ORDER_IS_THE_SAME = {
    *("num_workers", "pin_memory", "persistent_workers", "trust_remote_code", "dataloader_save", "dataloader_load"),
    *("do_validation", "do_test", "validation_source", "test_source", "tokenizer"),
}


class Qwen3VLCheckpointManager(DefaultCheckpointManager):
    """Megatron-Bridge's manager, without loading initial weights (`weight_loading.InitialWeights` does), and with
    modules on separate ranks treated as one model.

    Raises:
        CheckpointError: the run saves, and its folder cannot be written to, or its initial weights are in no known
            format.
    """

    def __init__(self, checkpoint_config: CheckpointConfig) -> None:
        super().__init__(checkpoint_config)
        with fail_together():  # before the model is built
            if is_first():
                _expect_folder(checkpoint_config)
        # Hugging Face files in the run's checkpoints: of its initial weights, or of the checkpoint it resumes from.
        self._export: ExportFiles | None = None
        first = checkpoint_config.pretrained_checkpoint
        if checkpoint_config.save is not None and first is not None and Path(first).is_dir():
            with fail_together():
                if is_first():
                    self._export = Pretrained.find(first).export_files()

    def save(self, ctx: CheckpointSaveContext, callback_manager: Any) -> None:
        """Save a checkpoint completely or not at all, if it is finished when this returns. A collective call.

        Raises:
            CheckpointError: a rank could not write; existing checkpoints are unchanged.
        """
        state, settings = ctx.state, ctx.state.cfg.checkpoint
        step, folder = state.train_state.step, Path(settings.save)
        final = Path(get_checkpoint_name(settings.save, step))
        with _as_one_model(ctx) as whole, _writing(settings):
            if ctx.non_persistent_ckpt or settings.async_save or "://" in str(settings.save):
                super().save(whole, callback_manager)
                with fail_together():  # non-persistent and remote checkpoints have no folder for them
                    if is_first() and final.is_dir() and not ctx.non_persistent_ckpt:
                        self._write_side_files(final, state.cfg)
                return
            with _staged_by_all_ranks(final) as staged:
                super().save(_saving_to(scratch_of(staged), whole), None)
                with fail_together():
                    if is_first():
                        written = Path(get_checkpoint_name(str(scratch_of(staged)), step))
                        state.cfg.to_yaml(str(written / RUN_CONFIG))  # Megatron-Bridge's file names the hidden folder
                        for path in written.iterdir():
                            path.rename(staged / path.name)
                        shutil.rmtree(scratch_of(staged))
                        self._write_side_files(staged, state.cfg)
            with fail_together():
                if is_first():
                    replace_file(folder / LATEST_TRAIN_STATE, (final / TRAIN_STATE).read_bytes())
                    replace_file(folder / TRACKER, str(step).encode())
                    self._remove_older(folder, step, settings.most_recent_k)
                    logger.info("saved %s", final)
            _announce(ctx, final, callback_manager)

    def _write_side_files(self, folder: Path, cfg: ConfigContainer) -> None:
        """Write what a checkpoint has beside Megatron-Bridge's files: a description of the data, and what an export
        needs.
        """
        _write_json(folder / RUN_DATA, _data_of(cfg))
        if self._export is None or cfg.checkpoint.also_save_hf_checkpoint:
            return
        for name, path in self._export.files.items():
            (folder / HF_FILES / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / HF_FILES / name)
        if (rope := getattr(cfg.model, "rope_parameters", None)) is not None:  # which a run may have set
            path = folder / HF_FILES / "config.json"
            config = read_object(path)
            if (scaled := with_scaled_rope(config, rope)) != config:
                _write_json(path, scaled)
        padding = {"vocab_divisor": cfg.model.make_vocab_size_divisible_by} if cfg.model.should_pad_vocab else {}
        _write_json(folder / MANIFEST, self._export.manifest | padding)

    def _remove_older(self, folder: Path, step: int, most: int | None) -> None:
        """Remove all but the newest checkpoints up to a step, never the one that the run started from."""
        if most is None or most < 0:
            return
        keep = None if self._export is None else self._export.source
        steps = {
            int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"iter_(\d{7,})", path.name))
        }
        for number in sorted(number for number in steps if number <= step)[:-most]:
            path = steps[number]
            if keep is None or not keep.exists() or not path.samefile(keep):
                # Renamed first, so that a partly removed folder is never taken for a checkpoint.
                path.rename(path.with_name(f".{path.name}{_REMOVED}"))
                logger.info("removed %s, older than the newest %d", path, most)
        for path in folder.glob(f".iter_*{_REMOVED}"):  # also those that a killed process left
            shutil.rmtree(path)

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, int]:
        """Load the run's own checkpoint, if it has one.

        Returns:
            The step to resume from, and the FLOPs done so far.

        Raises:
            CheckpointError: a schedule, an optimizer or adapters that differ from the checkpoint's.
            ValueError: data that differ from the run's.
        """
        settings, is_local = self.checkpoint_config, "local_checkpoint_manager" in self.checkpointing_context
        if not has_checkpoint(settings) and not is_local:
            return 0, 0
        # Megatron-Bridge caches files by name, and changes cached values: if a process has resumed from this run
        # before, that old checkpoint would be loaded again as if it were the newest.
        for cached in (read_run_config, read_train_state):
            cached.cache_clear()
        folder, cfg = None if is_local else folder_to_load(settings), ctx.state.cfg
        with fail_together():
            if folder is not None:
                if (folder / RUN_CONFIG).is_file():  # tensors of another scale would fit
                    check_same_adapters(folder, cfg.peft, compare=isinstance(cfg.peft, Qwen3VLParts))
                if ctx.optimizer is not None:
                    expect_optimizer(folder, cfg)
        with (
            _as_one_model(ctx) as whole,
            changed(
                settings,
                "load_rng",
                settings.load_rng and (settings.finetune or is_local or random_states_fit(settings, whole)),
            ),
            loads_either_form(whole.optimizer),
            chosen_schedule(whole, folder),
        ):
            loaded = super().load(whole)
        with fail_together():
            if folder is not None and not settings.finetune:
                _expect_data(folder, cfg, int(ctx.state.train_state.consumed_train_samples))
            if folder is not None and not settings.pretrained_checkpoint and is_first():
                self._export = Pretrained(folder, is_hf=False).export_files()
        return loaded


def _expect_folder(settings: CheckpointConfig) -> None:
    """Create the folder of a run that saves, and write there; warn if the run saves nothing."""
    if not settings.save or settings.save_interval == 0:
        name = "save_interval" if settings.save else "save"
        logger.warning(
            "checkpoint.%s is %r: the run saves nothing. Set checkpoint.save to a folder that only this run uses, and "
            "checkpoint.save_interval to a number of steps, or None for the end alone",
            *(name, getattr(settings, name)),
        )
    elif "://" not in str(settings.save):  # remote paths are not folders
        try:
            Path(settings.save).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=settings.save) as file:
                file.write(bytes(1 << 12))
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.save is {settings.save}, where nothing can be written: {error.strerror or error}; "
                "expected a folder that this user may write to, on a disk that has room"
            ) from error


MANAGER = f"{Qwen3VLCheckpointManager.__module__}.{Qwen3VLCheckpointManager.__name__}"


@contextlib.contextmanager
def _staged_by_all_ranks(target: Path) -> Iterator[Path]:
    """A hidden folder next to the target that all processes write; it becomes the target when all have finished.

    The body contains collectives of other packages. A process that fails between these cannot tell the others, which
    wait in one; so it raises at once, the launcher has to notice its end, and the target is unchanged.
    """
    with contextlib.ExitStack() as stack:
        staged = None
        with fail_together():
            if is_first():
                staged = stack.enter_context(atomic_directory(target, logger.info, replace=lambda _: True))
        staged = broadcast_object(staged)
        with fail_together():
            if not staged.is_dir():
                raise CheckpointError(f"{staged} is not visible here, expected a file system that all ranks share")
        try:
            yield staged
        except (CheckpointException, CheckpointError, OSError) as error:
            raise CheckpointError(_why_not(target, error)) from error
        wait_for_all()  # for all to have written
        with fail_together():
            stack.close()  # puts the folder in its place


def _why_not(target: Path, error: BaseException) -> str:
    """The message of a save that failed: how much room there is, which checkpoint, and what to do.

    Errors of writers say little: of a full disk, "enforce fail at inline_container.cc" or "Worker failure".
    """
    cause = joint_failure(error) if isinstance(error, CheckpointException) else error
    tracker, kept = target.parent / TRACKER, "there is no complete checkpoint, so that it begins again"
    if tracker.is_file():
        kept = f"it continues after step {tracker.read_text().strip()}, whose checkpoint is complete"
    return (
        f"{target} could not be saved: {cause}. Its disk had {free_space(target) / GIB:.3f} GiB "
        "free then. If that is too little, or a quota is used up, make room, and start the same command again: " + kept
    )


@contextlib.contextmanager
def _writing(settings: CheckpointConfig) -> Iterator[None]:
    """Have megatron-core's writer of `torch_dist` pass its threads' results through a queue of this process.

    It starts a process for that otherwise, also if it saves synchronously: it is spawned, so it imports the user's
    script, it lives as long as the run, and launchers send it the signal that asks to save and exit.
    """
    if settings.async_save:
        yield
        return
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = None  # Megatron-Bridge would end its process when a run fails


def _saving_to(folder: Path, ctx: CheckpointSaveContext) -> CheckpointSaveContext:
    """A context whose settings, copied, save to the folder, remove no older checkpoint and tell no tracker."""
    state, cfg = copy.copy(ctx.state), copy.copy(ctx.state.cfg)
    cfg.checkpoint, cfg.logger, cfg.dataset = copy.copy(cfg.checkpoint), copy.copy(cfg.logger), copy.copy(cfg.dataset)
    cfg.checkpoint.save, cfg.checkpoint.most_recent_k = str(folder), -1
    for name, setting in _EXPERIMENTS.items():
        setattr(state, name, None)
        setattr(cfg.logger, setting, None)
    reads_itself = hasattr(getattr(ctx.train_data_iterator, "iterable", None), "save_state")
    if reads_itself and getattr(cfg.dataset, "dataloader_save", None) is None:
        cfg.dataset.dataloader_save = os.path.join(ctx.state.cfg.checkpoint.save, DATALOADER_STATE_SUBDIR)
    state._cfg = cfg  # the property's setter would start what depends on settings again
    return dataclasses.replace(ctx, state=state)


def _announce(ctx: CheckpointSaveContext, final: Path, callback_manager: Any) -> None:
    """What Megatron-Bridge does after a checkpoint is complete."""
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


def _as_one_model(ctx: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext(as_one_model(ctx) if ctx.state.cfg.model.dist_train.use_dist_train else ctx)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _data_of(cfg: ConfigContainer) -> dict[str, Any]:
    """Settings that determine the order of samples, as plain values."""
    if isinstance(cfg.dataset, ConversationRows):
        return dict(cfg.dataset.position or {})
    fields = {f.name: repr(getattr(cfg.dataset, f.name)) for f in dataclasses.fields(cfg.dataset)}
    identity = {"type": type(cfg.dataset).__name__, **{k: v for k, v in fields.items() if k not in _ORDER_IS_THE_SAME}}
    if cfg.dataset.dataloader_type == "single":  # in order, so a run may be extended
        return identity
    # These shuffle the indices of all samples that the whole run consumes, in parts by rank or by global batch.
    share = dict(dp_size=cfg.data_parallel_size, micro_batch_size=cfg.train.micro_batch_size)
    return identity | share | dict(global_batch_size=cfg.train.global_batch_size, seed=cfg.rng.seed)


def _expect_data(folder: Path, cfg: ConfigContainer, row: int) -> None:
    """Make a run, which has consumed `row` rows, refuse other data than those that a checkpoint describes.

    Our data sets are built after this, and raise then.
    """
    if row and isinstance(cfg.dataset, EnergonDatasetConfig):
        # Megatron-Bridge 0.6.2 saves no state of its own energon loader, and reports nothing if it finds none.
        states = Path(getattr(cfg.dataset, "dataloader_load", None) or folder.parent / DATALOADER_STATE_SUBDIR)
        if not (states / folder.name).is_dir():
            raise ValueError(
                f"dataset is an EnergonDatasetConfig, and {states} has no state of its loader for {folder.name}: the "
                "run would read its data from the beginning again. Expected a dataset whose position is in the "
                "checkpoint, such as Qwen3VLEnergonProvider; or checkpoint.finetune=True, to start a new run from "
                "these weights"
            )
    if not (folder / RUN_DATA).is_file():
        return
    saved = read_object(folder / RUN_DATA)
    if isinstance(cfg.dataset, ConversationRows):
        cfg.dataset.expect_position(saved, row)
    else:
        check_position(_data_of(cfg), saved)


def check_script() -> None:
    """Refuse to continue if a process that asynchronous saving has spawned runs the user's script again.

    Raises:
        RuntimeError: this is such a process.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # the test that multiprocessing itself uses
        raise RuntimeError(
            "this process was started to save checkpoints, but ran the training script again: the script must do its "
            'work under `if __name__ == "__main__":`'
        )
