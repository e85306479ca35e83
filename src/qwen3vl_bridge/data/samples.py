"""The samples of one source: measured first, encoded when their row is due.

What lives here: what happens to samples that are bad, or longer than a row. What may not: rows (`rows.py`), keeping
sizes (`sizes.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from typing import Literal

import torch

from .choices import check_choice
from .collate import pad_token_id
from .encode import EncodedSample, Encoder
from .errors import DataError
from .sizes import NOTHING, AllSizes, LatestSizes, Size, Sizes
from .sources import ConversationSource

logger = logging.getLogger(__name__)

OnLong = Literal["error", "drop", "truncate"]
OnBad = Literal["error", "drop"]


class Samples:
    """Samples by number."""

    def __init__(
        self,
        file: ConversationSource,
        encoder: Encoder,
        *,
        limit: int,
        most_patches: int | None = None,
        on_long: OnLong = "error",
        on_bad: OnBad = "error",
        sizes: Sizes | None = None,
    ) -> None:
        """Take a source's conversations as samples.

        Args:
            file: the conversations.
            encoder: turns them into tokens.
            limit: most tokens a sample may have.
            most_patches: most patches its pictures may have; any number if None.
            on_long: refuse a longer one; or drop it; or cut it short, without cutting a picture. The latter two are
                counted and reported. One of too many patches is refused or dropped.
            on_bad: refuse one that cannot be encoded, or drop, count and report it.
            sizes: those that were measured before, by the same rules; None if nothing was.
        """
        check_choice("on_long", on_long, OnLong)
        check_choice("on_bad", on_bad, OnBad)
        self.file, self._encoder, self.limit, self.most_patches = file, encoder, limit, most_patches
        self.on_long, self.on_bad = on_long, on_bad
        self._sizes = sizes or (AllSizes(len(file)) if isinstance(file, Sized) else LatestSizes())
        self.num_dropped = self.num_truncated = 0

    def size(self, index: int) -> Size:
        """How much of a row a sample takes: nothing if it is dropped.

        Raises:
            DataError: a sample that is too long or cannot be read, where that is an error.
        """
        size = self._sizes.get(index)
        if size is None:
            size = self._measure(index)
            self._sizes.keep(index, size)
        return size

    @property
    def encoding(self) -> str:
        """As the encoder says what its samples depend on."""
        return self._encoder.fingerprint()

    def _measure(self, index: int) -> Size:
        place = self.file.sample_id(index)
        size = self._unless_bad(lambda: self._encoder.size(self.file[index])) or NOTHING
        if size.tokens > self.limit:
            problem = f"{place}: found a sample of {size.tokens} tokens, expected at most {self.limit}"
            if self.on_long == "error":
                raise DataError(f"{problem} (a row's length; on_long='drop' leaves it out, 'truncate' cuts it)")
            if self.on_long == "drop":
                return self._drop(problem)
            size = self._unless_bad(lambda: self._encoder.size(self.file[index], self.limit)) or NOTHING
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
        return NOTHING

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
        if len(sample) != (planned := self.size(index).tokens):
            raise DataError(sample.sample_id, f"found {len(sample)} tokens, but its row was planned for {planned}")
        return sample
