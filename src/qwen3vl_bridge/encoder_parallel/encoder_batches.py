"""The batches of vision ranks: those of the language replicas that they encode for.

What lives here: combining several streams into one. What may not: which replica encodes for which
(`parallel/encoder_replicas.py`), batches themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.common.settings.encoder_parallel import replicas_of

from megatron.bridge.training.state import GlobalState
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator

_STREAMS, _SPLIT = "qwen3vl_encoder_batches", "qwen3vl_split"


def replicas_read(provider: VisionLanguageProvider, groups: ProcessGroupCollection) -> tuple[Sequence[int], int]:
    """The data-parallel replicas whose batches this rank reads, and the number of replicas.

    Args:
        provider: the run's.
        groups: process groups of this rank's module.
    """
    if provider.add_encoder and provider.add_decoder:
        return (groups.dp.rank(),), groups.dp.size()
    replicas, own = replicas_of(provider), groups.dp.rank()
    return ((own,) if provider.add_decoder else replicas.language_replicas_of(own)), replicas.language


def read_split(state: GlobalState, split: str) -> None:
    """Set the split from which Megatron-Bridge's loop reads from now on.

    Args:
        state: the run's global state.
        split: "train", "valid" or "test".
    """
    setattr(state, _SPLIT, split)


def next_encoder_batch(state: GlobalState, given: Iterator[Any], groups: ProcessGroupCollection) -> tuple:
    """The next microbatch of each replica that a vision rank encodes for.

    Megatron-Bridge's loop assigns rows by the tower's own replicas; if those are as many as the language model's, they
    read the same rows. Otherwise its iterator is not used, and rows are read from the run's position. A script with its
    own iterator yields tuples, with a microbatch of each replica.

    Args:
        state: the run's global state.
        given: the loop's iterator.
        groups: process groups of the tower.
    """
    replicas = replicas_of(state.cfg.model)
    if not isinstance(given, RerunDataIterator) or replicas.vision == replicas.language:
        batch = next(given)
        return batch if isinstance(batch, tuple) else (batch,)
    if not hasattr(state, _STREAMS):
        setattr(state, _STREAMS, {})
    streams, split = getattr(state, _STREAMS), getattr(state, _SPLIT, "train")
    if split not in streams:
        streams[split] = _resumed_stream(state, split, groups)
    return next(streams[split])


def _resumed_stream(state: GlobalState, split: str, groups: ProcessGroupCollection) -> EncoderBatchStream:
    """Stream of a split, starting where Megatron-Bridge's loader of it does."""
    cfg, done = state.cfg, state.train_state
    read, size = replicas_read(cfg.model, groups)
    rows = cfg.dataset.shared_by(1)
    micro = cfg.train.micro_batch_size if split == "train" else cfg.validation.eval_micro_batch_size
    stream = EncoderBatchStream([rows.stream(split, dp_rank=one, dp_size=size, micro_batch_size=micro) for one in read])
    validated = 0 if cfg.validation.skip_train else done.consumed_valid_samples
    begun = {"train": done.consumed_train_samples, "valid": validated, "test": 0}
    stream.load_state_dict(stream.state_dict() | {"row": begun[split]})
    return stream


class EncoderBatchStream(Iterator[tuple[Any, ...]]):
    """Microbatches of several replicas at a time.

    Args:
        streams: one per replica.
    """

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams

    def __next__(self) -> tuple[Any, ...]:
        """The next microbatch of each replica."""
        return tuple(next(stream) for stream in self._streams)

    def state_dict(self) -> dict[str, Any]:
        """Position of the streams, which is equal on every rank."""
        return self._streams[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position.

        Args:
            state: of any rank.
        """
        for stream in self._streams:
            stream.load_state_dict(state)
