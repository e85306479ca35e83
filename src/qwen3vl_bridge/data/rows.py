"""Rows of a split: what the plan says, read and encoded.

What lives here: the dataset that both loops read rows from, and what happens to samples longer than a row. What may
not: positions in a run (`stream.py`), Megatron (`provider.py`).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qwen3vl_bridge.sequence import PackedBatch

import torch
from torch.utils.data import Dataset

from .collate import Collator
from .conversations import ConversationFile
from .encode import EncodedSample, Encoder
from .errors import DataError
from .plan import RowPlan, Window

logger = logging.getLogger(__name__)

OnLong = Literal["error", "drop"]
_UNKNOWN = -1


class Samples:
    """The samples of one file: measured first, encoded when their row is due."""

    def __init__(self, file: ConversationFile, encoder: Encoder, *, limit: int, on_long: OnLong = "error") -> None:
        """Take a file's conversations as samples.

        Args:
            file: the conversations.
            encoder: turns them into tokens.
            limit: most tokens a sample may have.
            on_long: refuse a longer one, or drop, count and report it.
        """
        if on_long not in ("error", "drop"):
            raise ValueError(f"on_long is {on_long!r}, expected 'error' or 'drop'")
        self.file, self._encoder, self.limit, self._on_long = file, encoder, limit, on_long
        self._lengths = array("q", [_UNKNOWN]) * len(file)
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self.file)

    def length(self, index: int) -> int:
        """Tokens of a sample, or 0 for one that is dropped.

        Raises:
            DataError: a sample that is too long, where that is an error, or that cannot be read.
        """
        if self._lengths[index] == _UNKNOWN:
            self._lengths[index] = self._measure(index)
        return self._lengths[index]

    def _measure(self, index: int) -> int:
        length = self._encoder.length(self.file[index])
        if length <= self.limit:
            return length
        problem = f"found a sample of {length} tokens, expected at most {self.limit}"
        if self._on_long == "error":
            raise DataError(self.file.sample_id(index), f"{problem} (a row's length; on_long='drop' leaves it out)")
        self.num_dropped += 1
        logger.warning("%s: %s: dropped, %d so far", self.file.sample_id(index), problem, self.num_dropped)
        return 0

    def encode(self, index: int) -> EncodedSample:
        """The sample's tokens and pixels.

        Raises:
            DataError: it cannot be encoded, or not to the length that its row was planned with.
        """
        sample = self._encoder(self.file[index])
        if len(sample) != self.length(index):
            raise DataError(
                sample.sample_id, f"found {len(sample)} tokens, but its row was planned for {self.length(index)}"
            )
        return sample


class Row(NamedTuple):
    """One row's samples, and the window of the plan that it is of."""

    samples: tuple[EncodedSample, ...]
    window: Window


@dataclass(frozen=True)
class RowSettings:
    """What a row is.

    Attributes:
        collator: lays samples out.
        pack: several samples in a row; otherwise one, padded.
        seed: of the samples' order; None for the file's own.
        window_size: samples that are packed together.
    """

    collator: Collator
    pack: bool = True
    seed: int | None = None
    window_size: int = 512


class RowDataset(Dataset[Row]):
    """Rows by number, without end; `len` is only how many a loop says it wants."""

    def __init__(
        self, samples: Samples, settings: RowSettings, *, length: int = 0, begin: Window | None = None
    ) -> None:
        """Rows of samples.

        Args:
            samples: what to read.
            settings: what a row is.
            length: what `len` answers.
            begin: window of the plan to go on from.
        """
        self.samples, self.settings, self._len = samples, settings, length
        self.plan = RowPlan(
            self._length_in_row,
            len(samples),
            capacity=settings.collator.seq_length,
            pack=settings.pack,
            seed=settings.seed,
            window_size=settings.window_size,
            begin=begin,
        )

    def _length_in_row(self, index: int) -> int:
        multiple = self.settings.collator.multiple if self.settings.pack else 1
        return -(-self.samples.length(index) // multiple) * multiple

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, number: int) -> Row:
        """Read and encode one row."""
        encoded = tuple(self.samples.encode(index) for index in self.plan.row(number))
        return Row(encoded, self.plan.window(number))

    def collate_fn(self, rows: Sequence[Row]) -> PackedBatch:
        """A microbatch of rows. Megatron-Bridge's loop looks for a function of this name.

        Raises:
            ValueError: several packed rows.
        """
        if not self.settings.pack:
            return self.settings.collator.padded([row.samples[0] for row in rows])
        if len(rows) != 1:
            raise ValueError(f"found a microbatch of {len(rows)} packed rows, expected 1: make the row longer instead")
        return self.settings.collator.packed(rows[0].samples)

    def fingerprint(self) -> dict[str, int | None]:
        """What must be the same for a row's number to mean the same row."""
        settings = self.settings
        return {
            "samples": len(self.samples),
            "bytes": self.samples.file.size,
            "seq_length": settings.collator.seq_length,
            "multiple": settings.collator.multiple,
            "pack": int(settings.pack),
            "seed": settings.seed,
            "window_size": settings.window_size,
        }


def without_loss(batch: PackedBatch, rows: Sequence[bool]) -> torch.Tensor:
    """[B, S] the batch's loss mask with nothing to train on in the rows marked."""
    return batch.loss_mask.masked_fill(torch.tensor(list(rows)).unsqueeze(-1), 0)
