"""The signal that asks a run to save and exit: which processes of a rank ignore it.

What lives here: applying the configuration's settings. What may not: the handler, which is Megatron-Bridge's; the start
of workers (`data/loading/worker_processes.py`), the process that saving starts
(`training/checkpointing/saving_process.py`).
"""

from __future__ import annotations

import logging

from qwen3vl_bridge.data.loading.worker_processes import end_workers_at_exit
from qwen3vl_bridge.data.row_settings import ConversationRows

from megatron.bridge.data.builders.energon import EnergonDatasetConfig
from megatron.bridge.training.config import ConfigContainer

logger = logging.getLogger(__name__)


def ignored_signal(cfg: ConfigContainer) -> int | None:
    """Number of the signal that data-loading processes ignore; None for none.

    Args:
        cfg: a run's.
    """
    return int(cfg.train.exit_signal) if cfg.train.exit_signal_handler_for_dataloader else None


def leave_exit_signal_to_run(cfg: ConfigContainer) -> None:
    """Let workers of our data sets ignore it, and warn if workers would end a run before it can save.

    Args:
        cfg: changed in place; a second call has no effect.
    """
    number = ignored_signal(cfg)
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
