"""Energon's batches for a training loop: a stream that can be resumed, and a single pass.

Energon gives each data-parallel rank its own part of the samples, with a separate position.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import batched, chain
from typing import Any, NamedTuple

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.energon.task_encoder import MeasuredSample, Qwen3VLTaskEncoder
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.loading.row_dataset import without_loss
from qwen3vl_bridge.data.sources.fingerprints import check_position

import torch

logger = logging.getLogger(__name__)


class Share(NamedTuple):
    """A data-parallel rank's part of the data.

    Attributes:
        rank: data-parallel rank.
        size: number of data-parallel ranks.
    """

    rank: int = 0
    size: int = 1

    def check(self) -> None:
        """Check that the rank is within its group.

        Raises:
            ValueError: it is not.
        """
        if not 0 <= self.rank < self.size:
            raise ValueError(f"found data-parallel rank {self.rank} of {self.size}, expected a rank inside its group")


class EnergonStream(Iterator[PackedBatch]):
    """Infinite stream of this rank's microbatches."""

    def __init__(
        self,
        make_loader: Callable[[], Any],
        fingerprint: Callable[[Any], Mapping[str, Any]],
        read_state: Callable[[Any], Any],
        share: Share,
    ) -> None:
        """Start at the first sample.

        Args:
            make_loader: creates Megatron-Bridge's `EnergonDataloader` at the beginning of the data.
            fingerprint: takes the loader; returns what has to be equal for a saved position to be valid.
            read_state: reads a loader's state from a file, without unpickling any other types.
            share: this rank's part.
        """
        self._make_loader, self._fingerprint, self._read_state, self._share = (
            make_loader,
            fingerprint,
            read_state,
            share,
        )
        self._loader, self._begun, self._given = make_loader(), False, 0

    def __next__(self) -> PackedBatch:
        """The next microbatch.

        Raises:
            DataError: a sample that cannot be trained on.
        """
        self._begun = True
        try:
            batch = next(self._loader)
        except DataError as error:
            raise error.without_traceback() from None
        self._given += 1
        return batch.packed

    def fingerprint(self) -> dict[str, Any]:
        """What has to be equal for a saved position to be valid."""
        return dict(self._fingerprint(self._loader))

    def save_state(self) -> Any:
        """Energon's own state of this rank; Megatron-Bridge's checkpoints save it in one file per rank."""
        return self._loader.save_state()

    def restore_state(self, state: Any) -> None:
        """Continue from a state of `save_state`, in a stream with the same settings.

        Raises:
            ValueError: the state is of another number of workers or rows per microbatch.
        """
        if self._begun:
            self._loader, self._begun = self._make_loader(), False
        try:
            self._loader.restore_state(state)
        except AssertionError as error:
            raise ValueError(
                f"energon refuses the position: {error}; expected the settings it was saved with"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream, for a checkpoint that one rank writes for all.

        With several ranks each rank has only its own state, so only the number of batches, equal on all ranks, is
        saved.
        """
        state = None
        if self._share.size == 1:
            file = io.BytesIO()
            torch.save(self.save_state(), file)
            state = file.getvalue()
        return {"batches": self._given, "state": state, "data": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from another stream's position: directly on one rank, by rereading all earlier batches on several.

        Args:
            state: `state_dict` of the other stream.

        Raises:
            ValueError: the other stream had other data, or another number of ranks or workers.
        """
        check_position(self._fingerprint(self._loader), state["data"])
        if state["state"] is not None:
            self.restore_state(self._read_state(io.BytesIO(state["state"])))
            self._given = state["batches"]
            return
        self._loader, self._given = self._make_loader(), 0
        logger.info("reading %d batches again, to where the checkpoint stands", state["batches"])
        for _ in range(state["batches"]):
            next(self)


def one_pass(
    samples: Iterable[MeasuredSample],
    encoder: Qwen3VLTaskEncoder,
    share: Share,
    *,
    micro_batch_size: int,
    window_size: int | None,
) -> Iterator[PackedBatch]:
    """Every sample once, with the same number of microbatches on every rank.

    Each rank reads all samples, but computes pixels only for its own rows. If the number of rows is not divisible, the
    last row is repeated without a loss.

    Args:
        samples: samples of all ranks.
        encoder: packs and collates.
        share: this rank's part.
        micro_batch_size: rows per microbatch.
        window_size: number of samples that are packed together; None for padded rows.

    Yields:
        This rank's microbatches.

    Raises:
        DataError: a sample cannot be encoded, or there are no samples.
    """
    share.check()
    if window_size is None:
        rows: Iterator[list[MeasuredSample]] = ([sample] for sample in samples)
    else:
        windows = (encoder.select_samples_to_pack(list(window)) for window in batched(samples, window_size))
        rows = chain.from_iterable(windows)
    start, total = share.rank * micro_batch_size, 0
    for group in batched(_as_raised(rows), share.size * micro_batch_size):
        total += len(group)
        numbers = range(start, start + micro_batch_size)
        mine = [_encoded(group[min(number, len(group) - 1)], encoder) for number in numbers]
        collator = encoder.collator
        batch = collator.padded([row[0] for row in mine]) if window_size is None else collator.packed(mine[0])
        yield replace(batch, loss_mask=without_loss(batch, [number >= len(group) for number in numbers]))
    if not total:
        raise DataError("found no samples, expected at least one")


def repeated(begin: Callable[[], Iterator[PackedBatch]], batches: int) -> Iterator[PackedBatch]:
    """Repeat a pass, with a fixed number of batches per pass; a shorter one is filled with its last batch, without a
    loss.

    Args:
        begin: starts a pass.
        batches: number of batches per pass.
    """
    while True:
        passed, batch = begin(), None
        for _ in range(batches):
            following = next(passed, None)
            if following is None:
                assert batch is not None  # a pass has at least one batch
                batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
            else:
                batch = following
            yield batch


def _encoded(row: list[MeasuredSample], encoder: Qwen3VLTaskEncoder) -> list[Any]:
    """A row with its pixels; a sample that is dropped only at this stage is replaced by one token."""
    sample_filter = encoder.sample_filter
    return [
        sample_filter.encode(lambda: sample.measured) or sample_filter.blank(sample.measured.conversation.sample_id)  # noqa: B023  (called at once)
        for sample in row
    ]


def _as_raised[Item](items: Iterator[Item]) -> Iterator[Item]:
    """The same items; errors from workers are raised without the workers' traceback."""
    try:
        yield from items
    except DataError as error:
        raise error.without_traceback() from None
