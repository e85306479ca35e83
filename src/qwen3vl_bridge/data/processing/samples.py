"""The samples of one source: measured first, encoded when their row is due."""

from __future__ import annotations

from collections.abc import Iterable, Sized

from qwen3vl_bridge.data.packing.sample_sizes import NOTHING, AllSizes, LatestSizes, Size, Sizes
from qwen3vl_bridge.data.processing.encoding import EncodedSample
from qwen3vl_bridge.data.processing.filtering import MeasuredConversation, SampleFilter
from qwen3vl_bridge.data.sources.opening import Conversations


class Samples:
    """Samples by number."""

    def __init__(self, file: Conversations, sample_filter: SampleFilter, sizes: Sizes | None = None) -> None:
        """Samples of a source's conversations.

        Args:
            file: the conversations.
            sample_filter: which of them become samples.
            sizes: sizes that were measured before, with the same settings; None if there are none.
        """
        self.file = file
        self.total = len(file) if isinstance(file, Sized) else None  # None for a stream
        self._sizes = sizes or (LatestSizes() if self.total is None else AllSizes(self.total))
        self.sample_filter = sample_filter.noting(self._sizes.note)

    def size(self, index: int) -> Size:
        """Space that a sample takes in a row: none if it is dropped.

        Raises:
            DataError: a sample that is too long or cannot be read, if that is an error.
        """
        size = self._sizes.get(index)
        if size is None:
            size = self._measured(index, wait=True)
        assert size is not None  # the process that was measuring it was waited for
        return size

    def measure(self, indices: Iterable[int]) -> None:
        """Measure those of several samples that no process has measured or is measuring.

        Raises:
            DataError: as for `size`.
        """
        for index in indices:
            if self._sizes.get(index) is None:
                self._measured(index, wait=False)

    def _measured(self, index: int, *, wait: bool) -> Size | None:
        """A sample's size; None while another process measures it, unless `wait` is set."""
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
        """The sample's tokens and pixels.

        A sample that turns out to be bad only now, such as a truncated image, and is dropped, is replaced in the row by
        a single token without loss.

        Raises:
            DataError: it cannot be encoded, if that is an error, or has another length than its row was planned with.
        """
        sample = self.sample_filter.encode(
            lambda: MeasuredConversation(self.file[index], self.size(index)), "unreadable"
        )
        return sample or self.sample_filter.blank(self.file.sample_id(index))
