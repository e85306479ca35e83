"""The samples of one source: measured first, encoded when their row is due.

What lives here: samples by number. What may not: which become samples (`filtering.py`), rows
(`data/loading/row_dataset.py`), keeping sizes (`data/packing/sample_sizes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

from qwen3vl_bridge.data.packing.sample_sizes import NOTHING, AllSizes, LatestSizes, Size, Sizes
from qwen3vl_bridge.data.processing.encoding import EncodedSample
from qwen3vl_bridge.data.processing.filtering import MeasuredConversation, SampleFilter
from qwen3vl_bridge.data.sources.opening import Conversations


class Samples:
    """Samples by number."""

    def __init__(self, file: Conversations, sample_filter: SampleFilter, sizes: Sizes | None = None) -> None:
        """Take a source's conversations as samples.

        Args:
            file: the conversations.
            sample_filter: which of them become samples.
            sizes: those that were measured before, by the same rules; None if nothing was.
        """
        self.file = file
        self.total = len(file) if isinstance(file, Sized) else None  # None of a stream
        self._sizes = sizes or (LatestSizes() if self.total is None else AllSizes(self.total))
        self.sample_filter = sample_filter.noting(self._sizes.note)

    def size(self, index: int) -> Size:
        """How much of a row a sample takes: nothing if it is dropped.

        Raises:
            DataError: a sample that is too long or cannot be read, where that is an error.
        """
        size = self._sizes.get(index)
        if size is None:
            size = self._measured(index, wait=True)
        assert size is not None  # whoever was measuring it was waited for
        return size

    def measure(self, indices: Iterable[int]) -> None:
        """Measure those of several samples that no process has measured, or is measuring.

        Raises:
            DataError: as `size`.
        """
        for index in indices:
            if self._sizes.get(index) is None:
                self._measured(index, wait=False)

    def _measured(self, index: int, *, wait: bool) -> Size | None:
        """A sample's size; None while another process measures it, unless that is waited for."""
        with self._sizes.claim(index, wait=wait) as is_mine:
            if not is_mine:
                return None
            size = self._sizes.get(index)  # by the process that held it before
            if size is None:
                measured = self.sample_filter.measure(lambda: self.file[index], self.file.sample_id(index))
                size = NOTHING if measured is None else measured.size
                self._sizes.keep(index, size)
            return size

    def encode(self, index: int) -> EncodedSample:
        """The sample's tokens and pixels.

        One that proves bad only now, such as a picture that breaks off, and is dropped, leaves its place in the row
        to a single token that nothing is trained on.

        Raises:
            DataError: it cannot be encoded, where that is an error, or not to the length that its row was planned with.
        """
        sample = self.sample_filter.encode(
            lambda: MeasuredConversation(self.file[index], self.size(index)), "unreadable"
        )
        return sample or self.sample_filter.blank(self.file.sample_id(index))
