"""The samples of a source: which conversations become samples, measured first, encoded when their row is due."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sized
from typing import Literal, NamedTuple

from qwen3vl_bridge.data.collation import pad_token_id
from qwen3vl_bridge.data.encoding import EncodedSample, Encoder
from qwen3vl_bridge.data.errors import Changed, DataError, Unreachable, check_choice
from qwen3vl_bridge.data.packing.sample_sizes import NOTHING, Left, Size, Sizes
from qwen3vl_bridge.data.schemas.conversations import Conversation
from qwen3vl_bridge.data.sources.mixture import Mixture
from qwen3vl_bridge.data.sources.opening import Conversations

import torch

logger = logging.getLogger(__name__)

OnLong = Literal["error", "drop", "truncate"]
OnBad = Literal["error", "drop"]

_NAMED = 4
# Ranks that share a row each read it, so their count is not the number of samples.
_LOG_TEXTS = {"dropped": "%s: dropped, %d so far", "cut": "%s: cut, %d so far", "unreadable": "%s: left blank (%d)"}


class MeasuredConversation(NamedTuple):
    """A conversation that becomes a sample, and the sample's size."""

    conversation: Conversation
    size: Size


class SampleFilter:
    """Measures and encodes conversations, and counts dropped and truncated ones. Picklable, for workers.

    Its own counts are per process; logged counts are shared with other processes (`noting`).
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        limit: int,
        most_patches: int | None = None,
        on_long: OnLong = "error",
        on_bad: OnBad = "error",
    ) -> None:
        """Set which conversations become samples.

        Args:
            encoder: the encoder.
            limit: maximum tokens of a sample.
            most_patches: maximum patches of its images and videos; None without a limit.
            on_long: for a longer one, and for one with too many patches, which is never truncated.
            on_bad: for a conversation that cannot be read or encoded. Those left out or cut are logged.
        """
        check_choice("on_long", on_long, OnLong)
        check_choice("on_bad", on_bad, OnBad)
        self.encoder, self.limit, self.most_patches = encoder, limit, most_patches
        self.on_long, self.on_bad = on_long, on_bad
        self.num_dropped = self.num_truncated = 0
        self._note = Sizes().note

    def noting(self, note: Callable[[Left], int]) -> SampleFilter:
        """The same, with counts shared with others by `note`, as `Sizes.note`."""
        shared = copy.copy(self)
        shared._note = note
        return shared

    def fingerprint(self) -> dict[str, int | str | None]:
        """Whatever must be equal for the same conversations to become the same samples."""
        return {
            "seq_length": self.limit,
            "encoding": self.encoder.fingerprint,
            "most_patches": self.most_patches,
            "on_long": self.on_long,
            "on_bad": self.on_bad,
        }

    def measure(self, read: Callable[[], Conversation], place: str) -> MeasuredConversation | None:
        """A conversation with its size, reading only headers of its images, None if it is dropped; a `DataError` with
        `place` if it cannot be read or is too long, and that is an error.
        """
        try:
            conversation = read()
            size = self.encoder.size(conversation)
            num_tokens = size.tokens
            if num_tokens > self.limit and self.on_long == "truncate":
                size = self.encoder.size(conversation, self.limit)
        except DataError as error:
            return self.refuse(error)
        if num_tokens > self.limit:
            problem = f"{place}: found a sample of {num_tokens} tokens, expected at most {self.limit}"
            if self.on_long == "error":
                raise DataError(f"{problem} (the length of a row; on_long='drop' drops the sample, 'truncate' cuts it)")
            if self.on_long == "drop":
                return self._drop(problem)
            self.num_truncated += 1
            self._log("cut", problem)
        if self.most_patches is not None and size.patches > self.most_patches:
            problem = f"{place}: found images of {size.patches} patches, expected at most {self.most_patches}"
            if self.on_long == "error":
                raise DataError(f"{problem} (the limit of a row; on_long='drop' drops the sample)")
            return self._drop(problem)
        return MeasuredConversation(conversation, size)

    def encode(self, read: Callable[[], MeasuredConversation], kind: Left = "dropped") -> EncodedSample | None:
        """Tokens and pixels; None for a sample that turns out to be bad only now, such as a truncated image. A
        `DataError` if that is an error, or for another size than it was measured with.

        `kind` is "unreadable" if its place in a row is kept, with a blank token.
        """
        try:
            conversation, size = read()
            sample = self.encoder(conversation, self.limit)
        except DataError as error:
            return self.refuse(error, kind)
        patches = sum(len(pixels) for pixels in (sample.pixel_values, sample.pixel_values_videos) if pixels is not None)
        if (len(sample), patches) != (size.tokens, size.patches):
            found = f"found {len(sample)} tokens and {patches} patches"
            planned = f"but its row was planned for {size.tokens} and {size.patches}: the data have changed since then"
            raise Changed(sample.sample_id, f"{found}, {planned}")
        return sample

    def encode_or_blank(self, read: Callable[[], MeasuredConversation], place: str) -> EncodedSample:
        """As `encode`, for a sample whose place in a row is kept: a bad one is replaced by a token without loss."""
        if sample := self.encode(read, "unreadable"):
            return sample
        token = torch.tensor([pad_token_id(self.encoder.processor.tokenizer)])
        return EncodedSample(token, token, torch.zeros(1), None, None, place)

    def refuse(self, error: DataError, kind: Left = "dropped") -> None:
        """Raise a sample's error, or count the sample as dropped (`kind` as for `encode`)."""
        if self.on_bad == "error" or isinstance(error, (Changed, Unreachable)):
            raise error
        self._drop(str(error), kind)

    def _drop(self, problem: str, kind: Left = "dropped") -> None:
        self.num_dropped += 1
        self._log(kind, problem)

    def _log(self, kind: Left, problem: str) -> None:
        """Log the first samples by name, then one whenever their number has doubled. At level DEBUG all are logged."""
        so_far = self._note(kind)
        is_named = 0 < so_far <= _NAMED or so_far.bit_count() == 1
        logger.log(logging.WARNING if is_named else logging.DEBUG, _LOG_TEXTS[kind], problem, so_far)


class Samples:
    """Samples by number."""

    def __init__(
        self,
        file: Conversations,
        sample_filter: SampleFilter,
        sizes: Sizes | None = None,
        note: Callable[[Left], int] | None = None,
    ) -> None:
        """Samples of a source's conversations, with sizes that were measured before, if there are any; `note` counts
        what is left out (`Sizes.note`), if not together with the sizes.
        """
        self.file = file
        self.total = len(file) if isinstance(file, Sized) else None  # None for a stream
        if sizes is None:
            sizes = Sizes() if self.total is None else Sizes(self.total)
        self._sizes = sizes
        self.sample_filter = sample_filter.noting(note or self._sizes.note)

    def set_of(self, index: int) -> int:
        """Index of the data set of a mixture that a sample belongs to; 0 for other sources."""
        return self.file.set_of(index) if isinstance(self.file, Mixture) else 0

    def size(self, index: int) -> Size:
        """Space that a sample takes in a row: none if it is dropped; raises like `SampleFilter.measure`."""
        size = self._measured(index, wait=True)
        assert size is not None  # the process that was measuring it was waited for
        return size

    def measure(self, indices: Iterable[int]) -> None:
        """Measure those of several samples that no process has measured or is measuring; raises like `size`."""
        for index in indices:
            self._measured(index, wait=False)

    def _measured(self, index: int, *, wait: bool) -> Size | None:
        """A sample's size; None while another process measures it, unless `wait` is set."""
        if (size := self._sizes.get(index)) is not None:
            return size
        with self._sizes.claim(index, wait=wait) as is_mine:
            if not is_mine:
                return None
            size = self._sizes.get(index)  # from the process that held the lock before
            if size is None:
                measured = self.sample_filter.measure(lambda: self.file[index], self.file.sample_id(index))
                size = NOTHING if measured is None else measured.size
                self._sizes.keep(index, size)
            return size

    def encode(self, index: int) -> EncodedSample:
        """The sample's tokens and pixels; see `SampleFilter.encode_or_blank`."""
        return self.sample_filter.encode_or_blank(
            lambda: MeasuredConversation(self.file[index], self.size(index)), self.file.sample_id(index)
        )
