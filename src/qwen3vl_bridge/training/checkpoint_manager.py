"""Checkpoints in Megatron-Bridge's own loop: its own saving and loading, by its checkpoint manager.

What lives here: when it has nothing to load, and putting the manager in. What may not: first weights
(`first_weights.py`), modules on ranks of their own (`modules_checkpoint.py`), checkpoints of the small loop
(`checkpoint.py`).

Megatron-Bridge's set-up asks the manager to load where a run has a checkpoint, or first weights, which are read by
then.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.checkpoint.megatron_folder import TORCH_DIST
from qwen3vl_bridge.parallel import tell_all
from qwen3vl_bridge.training.modules_checkpoint import as_one_model, random_states_of_module
from qwen3vl_bridge.training.saving_process import signals_kept, start_saving_process
from qwen3vl_bridge.training.together import is_first, together

from megatron.bridge.training.checkpointing import (
    CheckpointLoadContext,
    CheckpointSaveContext,
    DefaultCheckpointManager,
    _has_global_non_persistent_checkpoint,
)
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists, is_hf_checkpoint_dir


class Qwen3VLCheckpointManager(DefaultCheckpointManager):
    """Megatron-Bridge's, which loads no first weights, and takes modules on ranks of their own for one model."""

    def __init__(self, checkpoint_config: CheckpointConfig) -> None:
        """Get ready to save, before a model is built.

        Args:
            checkpoint_config: the run's.

        Raises:
            RuntimeError: a script whose process for saving would train.
        """
        super().__init__(checkpoint_config)
        by_itself = checkpoint_config.save is not None and not checkpoint_config.async_save
        if by_itself and checkpoint_config.ckpt_format == TORCH_DIST:
            start_saving_process()

    def save(self, ctx: CheckpointSaveContext, callback_manager: Any) -> None:
        """Save a checkpoint.

        Args:
            ctx: Megatron-Bridge's.
            callback_manager: Megatron-Bridge's.
        """
        with as_one_model(ctx) as whole, signals_kept():
            super().save(whole, callback_manager)

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, int]:
        """Load the run's own checkpoint, where it has one.

        Args:
            ctx: Megatron-Bridge's.

        Returns:
            The step to go on from, and the operations done so far.
        """
        settings = self.checkpoint_config
        if not has_checkpoint(settings) and "local_checkpoint_manager" not in self.checkpointing_context:
            return 0, 0
        with as_one_model(ctx) as whole, random_states_of_module(settings, ctx.state.cfg.model):
            return super().load(whole)


MANAGER = f"{Qwen3VLCheckpointManager.__module__}.{Qwen3VLCheckpointManager.__name__}"


def has_checkpoint(settings: CheckpointConfig) -> bool:
    """Whether a run has a checkpoint of its own to go on from, as Megatron-Bridge sees it. Every rank calls this."""
    found = False
    with together():
        if is_first():
            found = (
                checkpoint_exists(settings.load)
                or is_hf_checkpoint_dir(settings.load)  # which Megatron-Bridge then refuses
                or _has_global_non_persistent_checkpoint(settings.load, settings)
            )
    return tell_all(found)


def manage_checkpoints(cfg: ConfigContainer) -> None:
    """Put the manager in where a run needs it. One of the user's own is left alone.

    Args:
        cfg: changed in place; a second call changes nothing more.
    """
    leave_checkpoints(cfg)
    settings = cfg.checkpoint
    used = any(path is not None for path in (settings.pretrained_checkpoint, settings.save))
    if (used or cfg.model.dist_train.use_dist_train) and settings.custom_manager_class is None:
        settings.custom_manager_class = MANAGER


def leave_checkpoints(cfg: ConfigContainer) -> None:
    """Take it out again, for a loop that saves and loads by itself.

    Args:
        cfg: changed in place.
    """
    if is_managed(cfg):
        cfg.checkpoint.custom_manager_class = None


def is_managed(cfg: ConfigContainer) -> bool:
    """Whether a run's checkpoints are managed by ours."""
    return cfg.checkpoint.custom_manager_class == MANAGER
