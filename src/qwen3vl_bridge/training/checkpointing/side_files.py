"""Files of a run's checkpoint in addition to Megatron-Bridge's: Hugging Face files, and a description of its data.

What lives here: writing both, and comparing the data of a resumed run. What may not: tensors, when a checkpoint is
written (`training/checkpoint_manager.py`), the description of data (from the data sets).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.row_settings import ConversationRows
from qwen3vl_bridge.data.sources.fingerprints import check_position
from qwen3vl_bridge.files.json_files import read_object, write_object
from qwen3vl_bridge.training.checkpointing.weight_loading import Pretrained

from megatron.bridge.data.builders.energon import EnergonDatasetConfig
from megatron.bridge.training.checkpointing import DATALOADER_STATE_SUBDIR
from megatron.bridge.training.config import ConfigContainer

RUN_DATA = "run_data.json"
# Fields of Megatron-Bridge's data sets that do not affect which samples there are, and in which order.
_ORDER_IS_THE_SAME = {
    *("num_workers", "pin_memory", "persistent_workers", "trust_remote_code", "dataloader_save", "dataloader_load"),
    *("do_validation", "do_test", "validation_source", "test_source", "tokenizer"),
}


def write_side_files(folder: Path, cfg: ConfigContainer, origin: Pretrained | None) -> None:
    """Write them; called on one rank.

    Args:
        folder: the checkpoint's.
        cfg: the run's.
        origin: folder of its Hugging Face files; None for no files.
    """
    write_object(folder / RUN_DATA, _data_of(cfg))
    if origin is not None:
        origin.write_export_files(folder, cfg.model)


def expect_data(folder: Path, cfg: ConfigContainer, row: int) -> None:
    """Make a run refuse other data than those of its position; no check for a checkpoint without a description.

    Our data sets are built after this, and raise then.

    Args:
        folder: the checkpoint's.
        cfg: the run's.
        row: number of rows that the run has consumed.

    Raises:
        ValueError: they differ, or are read by a loader that would start them from the beginning.
    """
    if row and isinstance(cfg.dataset, EnergonDatasetConfig):
        _expect_loader_state(folder, cfg.dataset)
    if not (folder / RUN_DATA).is_file():
        return
    saved = read_object(folder / RUN_DATA)
    if isinstance(cfg.dataset, ConversationRows):
        cfg.dataset.expect_position(saved, row)
    else:
        check_position(_data_of(cfg), saved)


def _expect_loader_state(folder: Path, dataset: EnergonDatasetConfig) -> None:
    """Megatron-Bridge 0.6.2 saves no state of its own energon loader, and reports nothing if it finds none."""
    states = Path(getattr(dataset, "dataloader_load", None) or folder.parent / DATALOADER_STATE_SUBDIR)
    if not (states / folder.name).is_dir():
        raise ValueError(
            f"dataset is an EnergonDatasetConfig, and {states} has no state of its loader for {folder.name}: the run "
            "would read its data from the beginning again. Expected a dataset whose position is in the checkpoint, "
            "such as Qwen3VLEnergonProvider; or checkpoint.finetune=True, to start a new run from these weights"
        )


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
