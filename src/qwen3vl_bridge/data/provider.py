"""Conversations as a Megatron-Bridge dataset: one configuration for Megatron-Bridge's loop and for ours.

What lives here: the configuration, and what each loop asks of it. The only module of `data` that knows Megatron. What
may not: reading, encoding, packing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from qwen3vl_bridge.cost import TowerCosts, tower_costs
from qwen3vl_bridge.sequence import PackedBatch

import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from transformers import AutoConfig

from .choices import check_choice
from .collate import Collator, VisionSettings, pad_token_id
from .encode import Answers, Encoder
from .packed import PackedRows
from .plan import Window
from .processor import VisionLimits, load_processor
from .rows import Balance, RowDataset, RowSettings
from .samples import OnBad, OnLong, Samples
from .sources import open_source
from .stream import BatchStream, one_pass

SPLITS = ("train", "valid", "test")


@dataclass(kw_only=True)
class Qwen3VLConversationProvider(DatasetProvider):
    """Rows of conversations with pictures.

    Only the training split is shuffled. A "sample" of Megatron-Bridge's counters is a row.

    Attributes:
        train_path: conversations: a file of JSON or Parquet, a folder, or "hf://owner/name#split" (see `sources.py`).
        valid_path: likewise, for validation, or None.
        test_path: likewise, or None.
        media_root: folder of the pictures; by default that of each file.
        hf_processor_path: the Hugging Face checkpoint, local or on the hub: its processor, chat template and config.
        seq_length: tokens of a row.
        max_patches: patches of pictures and videos in a row, so that the vision tower has its bound too; None for no
            bound. A picture's tokens are a quarter of its patches.
        pack: several conversations in a row, best-fit, with micro_batch_size 1; otherwise one in each, padded.
        train_packing: folder with rows of the training split that `qwen3vl-data pack` made, by these settings. Without
            it every data-loading process measures every conversation, which is too much for millions of them.
        balance_over: rows of a global batch, so that they are dealt out to data-parallel ranks by what they cost both
            towers; None to read them as they come. A multiple of the ranks.
        seed: of the order of the training split.
        on_long: what to do with a conversation longer than a row: "error"; or "drop" it, or "truncate" it without
            cutting a picture, counted and reported.
        on_bad: what to do with one that cannot be read or encoded: "error", or "drop", counted and reported.
        vision: how much is seen of pictures and videos, where not as the checkpoint says.
        answers: which of an assistant's answers to train on, "all" or the "last".
        window_size: conversations that are packed together, where they are packed as they are read.
        pad_to_multiple_of: each conversation of a packed row is padded to a multiple of this: 2 * cp, and of the
            tensor-parallel size under sequence parallelism.
        pixel_dtype: what pixels leave as.
        dataloader_type: rows are numbered without end, in order, so "single" resumes exactly.
    """

    train_path: str
    valid_path: str | None = None
    test_path: str | None = None
    media_root: str | None = None
    hf_processor_path: str
    seq_length: int
    max_patches: int | None = None
    pack: bool = True
    train_packing: str | None = None
    balance_over: int | None = None
    seed: int = 1234
    on_long: OnLong = "error"
    on_bad: OnBad = "error"
    answers: Answers = "all"
    vision: VisionLimits = field(default_factory=VisionLimits)
    window_size: int = 512
    pad_to_multiple_of: int = 1
    pixel_dtype: torch.dtype = torch.float32
    dataloader_type: Any = "single"

    def finalize(self) -> None:
        """Check what can be checked without reading data.

        Raises:
            ValueError: a setting with a value it cannot have.
        """
        super().finalize()
        if self.dataloader_type != "single":
            raise ValueError(
                f"dataloader_type is {self.dataloader_type!r}, expected 'single': rows are in order already"
            )
        for name, kind in (("on_long", OnLong), ("on_bad", OnBad), ("answers", Answers)):
            check_choice(name, getattr(self, name), kind)
        if self.max_patches is not None and self.max_patches < 1:
            raise ValueError(f"max_patches is {self.max_patches}, expected a positive number or None")
        if self.balance_over is not None and self.balance_over < 1:
            raise ValueError(f"balance_over is {self.balance_over}, expected a positive number or None")
        for name in ("train_packing", "balance_over"):
            if not self.pack and getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but pack is off; it is for packed rows")
        if self.seq_length % self.pad_to_multiple_of:
            raise ValueError(
                f"seq_length is {self.seq_length}, expected a multiple of pad_to_multiple_of, {self.pad_to_multiple_of}"
            )

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[RowDataset | None, RowDataset | None, RowDataset | None]:
        """Rows of each split for Megatron-Bridge's loop, with as many as it asks for.

        Raises:
            DataError: files that are not there or cannot be read.
        """
        wanted = (context.train_samples, context.valid_samples, context.test_samples)
        ranks = context.pg_collection.dp.size() if context.pg_collection is not None else 1
        return tuple(  # pyright: ignore[reportReturnType]  (three of them)
            self.rows(split, length=length, ranks=ranks) if length and getattr(self, f"{split}_path") else None
            for split, length in zip(SPLITS, wanted, strict=True)
        )

    def stream(self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1) -> BatchStream:
        """Microbatches without end, for a loop of ours. Its `state_dict` goes into the checkpoint.

        Args:
            split: "train", "valid" or "test".
            dp_rank: this data-parallel rank.
            dp_size: how many there are.
            micro_batch_size: rows of a microbatch.
        """
        return BatchStream(
            lambda begin: self.rows(split, begin=begin, ranks=dp_size),
            dp_rank=dp_rank,
            dp_size=dp_size,
            micro_batch_size=micro_batch_size,
            num_workers=self.num_workers,
        )

    def evaluation(
        self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1
    ) -> Iterator[PackedBatch]:
        """Every row of a split once, in the file's order; arguments as for `stream`."""
        rows = self.rows(split, shuffle=False)
        return one_pass(rows, dp_rank=dp_rank, dp_size=dp_size, micro_batch_size=micro_batch_size)

    def rows(
        self,
        split: str,
        *,
        length: int = 0,
        begin: Window | None = None,
        shuffle: bool | None = None,
        ranks: int = 1,
    ) -> RowDataset:
        """Rows of a split.

        Args:
            split: "train", "valid" or "test".
            length: what their `len` answers.
            begin: window to go on from.
            shuffle: whether in random order; by default only the training split is. What is not, is not dealt out
                either.
            ranks: data-parallel ranks.

        Raises:
            ValueError: a split that has no path, or rows that were packed by other settings.
            DataError: a file that is not there or cannot be read.
        """
        path = getattr(self, f"{split}_path", None)
        if path is None:
            raise ValueError(f"the split {split!r} has no {split}_path; splits are {', '.join(SPLITS)}")
        checkpoint = _of_checkpoint(self.hf_processor_path, self.answers, self.vision)
        shuffled = split == "train" if shuffle is None else shuffle
        packed = PackedRows(self.train_packing) if split == "train" and self.train_packing else None
        samples = Samples(
            open_source(path, self.media_root),
            checkpoint.encoder,
            limit=self.seq_length,
            most_patches=self.max_patches,
            on_long=self.on_long,
            on_bad=self.on_bad,
            sizes=None if packed is None else packed.sizes(),
        )
        settings = RowSettings(
            Collator(checkpoint.vision, checkpoint.pad_id, self.seq_length, self.pad_to_multiple_of, self.pixel_dtype),
            self.pack,
            self.seed if shuffled else None,
            self.window_size,
            packed,
            Balance(self.balance_over, checkpoint.costs) if shuffled and self.balance_over else None,
        )
        return RowDataset(samples, settings, length=length, begin=begin, ranks=ranks)


@dataclass(frozen=True)
class _Checkpoint:
    """What a checkpoint says about encoding, laying out and dealing out."""

    encoder: Encoder
    vision: VisionSettings
    pad_id: int
    costs: TowerCosts


@cache
def _of_checkpoint(path: str, answers: Answers, limits: VisionLimits) -> _Checkpoint:
    """Read once a process."""
    processor = load_processor(path, limits)
    return _Checkpoint(
        Encoder(processor, answers),
        VisionSettings.of_checkpoint(path, processor),
        pad_token_id(processor.tokenizer),
        tower_costs(AutoConfig.from_pretrained(path).to_dict()),
    )
