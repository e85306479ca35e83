"""Energon's batches for a training loop: a stream that can be left and resumed, and one pass.

What lives here: what a loop asks of energon's loaders. What may not: what a batch is made of (`task_encoder.py`),
Megatron-Bridge (`provider.py`).

Energon gives each data-parallel rank its own share of the samples, with a position of its own.
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
    """A data-parallel rank's part.

    Attributes:
        rank: which it is.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    def check(self) -> None:
        """Refuses a rank outside its group.

        Raises:
            ValueError: it is.
        """
        if not 0 <= self.rank < self.size:
            raise ValueError(f"found data-parallel rank {self.rank} of {self.size}, expected a rank inside its group")


class EnergonStream(Iterator[PackedBatch]):
    """This rank's microbatches without end."""

    def __init__(
        self,
        make_loader: Callable[[], Any],
        fingerprint: Callable[[Any], Mapping[str, Any]],
        read_state: Callable[[Any], Any],
        share: Share,
    ) -> None:
        """Start at the first sample.

        Args:
            make_loader: makes Megatron-Bridge's `EnergonDataloader` at the beginning of the data.
            fingerprint: what must be the same, given the loader, for a position to mean the same.
            read_state: reads a file with a loader's state, and builds nothing but such states.
            share: this rank's.
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
        """What must be the same for a position to mean the same."""
        return dict(self._fingerprint(self._loader))

    def save_state(self) -> Any:
        """Energon's own state of this rank, as Megatron-Bridge's checkpoints keep it, one file a rank."""
        return self._loader.save_state()

    def restore_state(self, state: Any) -> None:
        """Go on from a state of `save_state`, in a stream with the same settings.

        Raises:
            ValueError: it is of another number of workers or rows a microbatch.
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
        """Where the stream stands, for a checkpoint that one rank writes for all.

        Several ranks have several states, of which a rank knows its own alone. But all have given out as many batches.
        """
        state = None
        if self._share.size == 1:
            file = io.BytesIO()
            torch.save(self.save_state(), file)
            state = file.getvalue()
        return {"batches": self._given, "state": state, "data": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another stream stood: at once on one rank, by reading again what was read on several.

        Args:
            state: its `state_dict`.

        Raises:
            ValueError: it was of other data, or of another number of ranks or workers.
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
    """Every sample once, the same number of microbatches on every rank.

    Each rank goes through all samples and makes the pixels of its own rows alone. Where the rows don't go round, the
    last one is repeated without anything to train on.

    Args:
        samples: of all ranks.
        encoder: packs and lays out.
        share: this rank's.
        micro_batch_size: rows of a microbatch.
        window_size: samples that are packed together; None for padded rows.

    Yields:
        This rank's microbatches.

    Raises:
        DataError: a sample that cannot be encoded, or no sample at all.
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
    """A pass over and over, so many batches of it each time; after its end, its last one without anything to train on.

    Args:
        begin: begins the pass.
        batches: of each time.
    """
    while True:
        passed, batch = begin(), None
        for _ in range(batches):
            following = next(passed, None)
            if following is None:
                assert batch is not None  # a pass has one
                batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
            else:
                batch = following
            yield batch


def _encoded(row: list[MeasuredSample], encoder: Qwen3VLTaskEncoder) -> list[Any]:
    """A row with its pixels; one token stands for a sample that is dropped only now."""
    sample_filter = encoder.sample_filter
    return [
        sample_filter.encode(lambda: sample.measured) or sample_filter.blank(sample.measured.conversation.sample_id)  # noqa: B023  (called at once)
        for sample in row
    ]


def _as_raised[Item](items: Iterator[Item]) -> Iterator[Item]:
    """The same; errors from workers without the workers' traceback."""
    try:
        yield from items
    except DataError as error:
        raise error.without_traceback() from None
