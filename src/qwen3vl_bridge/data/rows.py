"""Rows of a split: what the plan says, read and encoded.

What lives here: the dataset that both loops read rows from, and what happens to samples that are bad or longer than
a row. What may not: positions in a run (`stream.py`), Megatron (`provider.py`).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qwen3vl_bridge.sequence import PackedBatch

import torch
from torch.utils.data import Dataset

from .choices import check_choice
from .collate import Collator, pad_token_id
from .encode import EncodedSample, Encoder, Size
from .errors import DataError
from .plan import RowPlan, Window
from .sources import ConversationSource

logger = logging.getLogger(__name__)

OnLong = Literal["error", "drop", "truncate"]
OnBad = Literal["error", "drop"]
_UNKNOWN, _NOTHING = -1, Size(0, 0)


class Samples:
    """The samples of one file: measured first, encoded when their row is due."""

    def __init__(
        self,
        file: ConversationSource,
        encoder: Encoder,
        *,
        limit: int,
        most_patches: int | None = None,
        on_long: OnLong = "error",
        on_bad: OnBad = "error",
    ) -> None:
        """Take a file's conversations as samples.

        Args:
            file: the conversations.
            encoder: turns them into tokens.
            limit: most tokens a sample may have.
            most_patches: most patches its pictures may have; any number if None.
            on_long: refuse a longer one; or drop it; or cut it short, without cutting a picture. The latter two are
                counted and reported. One of too many patches is refused or dropped.
            on_bad: refuse one that cannot be encoded, or drop, count and report it.
        """
        check_choice("on_long", on_long, OnLong)
        check_choice("on_bad", on_bad, OnBad)
        self.file, self._encoder, self.limit, self.most_patches = file, encoder, limit, most_patches
        self.on_long, self.on_bad = on_long, on_bad
        self._lengths, self._patches = array("q", [_UNKNOWN]) * len(file), array("q", [0]) * len(file)
        self.num_dropped = self.num_truncated = 0

    def __len__(self) -> int:
        return len(self.file)

    def length(self, index: int) -> int:
        """Tokens of a sample, or 0 for one that is dropped.

        Raises:
            DataError: a sample that is too long or cannot be read, where that is an error.
        """
        if self._lengths[index] == _UNKNOWN:
            self._lengths[index], self._patches[index] = self._measure(index)
        return self._lengths[index]

    @property
    def encoding(self) -> str:
        """As the encoder says what its samples depend on."""
        return self._encoder.fingerprint()

    def patches(self, index: int) -> int:
        """Patches of a sample's pictures; raises as `length` does."""
        self.length(index)
        return self._patches[index]

    def _measure(self, index: int) -> Size:
        place = self.file.sample_id(index)
        size = self._unless_bad(lambda: self._encoder.size(self.file[index])) or _NOTHING
        if size.tokens > self.limit:
            problem = f"{place}: found a sample of {size.tokens} tokens, expected at most {self.limit}"
            if self.on_long == "error":
                raise DataError(f"{problem} (a row's length; on_long='drop' leaves it out, 'truncate' cuts it)")
            if self.on_long == "drop":
                return self._drop(problem)
            size = self._unless_bad(lambda: self._encoder.size(self.file[index], self.limit)) or _NOTHING
            if size.tokens:
                self.num_truncated += 1
                logger.warning("%s: cut, %d so far", problem, self.num_truncated)
        if self.most_patches is not None and size.patches > self.most_patches:
            problem = f"{place}: found pictures of {size.patches} patches, expected at most {self.most_patches}"
            if self.on_long == "error":
                raise DataError(f"{problem} (what a row holds; on_long='drop' leaves the sample out)")
            return self._drop(problem)
        return size

    def _unless_bad[Result](self, work: Callable[[], Result]) -> Result | None:
        """What work gives; None for a bad sample that is dropped."""
        try:
            return work()
        except DataError as error:
            if self.on_bad == "error":
                raise
            self._drop(str(error))
            return None

    def _drop(self, problem: str) -> Size:
        self.num_dropped += 1
        logger.warning("%s: dropped, %d so far", problem, self.num_dropped)
        return _NOTHING

    def encode(self, index: int) -> EncodedSample:
        """The sample's tokens and pixels.

        One that proves bad only now, such as a picture that breaks off, and is dropped, leaves its place in the row
        to a single token that nothing is trained on.

        Raises:
            DataError: it cannot be encoded, where that is an error, or not to the length that its row was planned with.
        """
        sample = self._unless_bad(lambda: self._encode(index))
        if sample is not None:
            return sample
        token = torch.tensor([pad_token_id(self._encoder.processor.tokenizer)])
        return EncodedSample(token, token, torch.zeros(1), None, None, self.file.sample_id(index))

    def _encode(self, index: int) -> EncodedSample:
        sample = self._encoder(self.file[index], self.limit)
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
            patches=samples.patches,
            most_patches=samples.most_patches,
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

    def fingerprint(self) -> dict[str, int | str | None]:
        """What must be the same for a row's number to mean the same row."""
        settings = self.settings
        return {
            "samples": len(self.samples),
            "bytes": self.samples.file.fingerprint(),
            "seq_length": settings.collator.seq_length,
            "multiple": settings.collator.multiple,
            "pack": int(settings.pack),
            "seed": settings.seed,
            "window_size": settings.window_size,
            "encoding": self.samples.encoding,
            "most_patches": self.samples.most_patches,
            "on_long": self.samples.on_long,
            "on_bad": self.samples.on_bad,
        }


def without_loss(batch: PackedBatch, rows: Sequence[bool]) -> torch.Tensor:
    """[B, S] the batch's loss mask with nothing to train on in the rows marked."""
    return batch.loss_mask.masked_fill(torch.tensor(list(rows)).unsqueeze(-1), 0)
