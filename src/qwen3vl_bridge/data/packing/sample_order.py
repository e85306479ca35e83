"""In which order an epoch reads its samples.

What lives here: what a plan asks of an order, and that of samples that are read by number. What may not: rows
(`row_plan.py`), orders of streams (`data/sources/hub_streaming.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

_KEPT = 2  # epochs: what is read together may lie on both sides of an epoch's end


@runtime_checkable
class Order(Protocol):
    """Samples by their place in an epoch; the same in every process."""

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Which samples stand at places `start` to `start + count - 1`; fewer, or none, where the epoch ends.

        Args:
            epoch: which pass over the samples.
            start: the first place.
            count: how many places.
        """
        ...


class NumberedOrder(Order):
    """Samples 0 to n - 1, as they are numbered or at random, anew each epoch."""

    def __init__(self, num_samples: int, seed: int | None = None) -> None:
        """Order samples.

        Args:
            num_samples: n.
            seed: of the order; None for that of the numbers.

        Raises:
            ValueError: there are none.
        """
        if num_samples < 1:
            raise ValueError(f"found {num_samples} samples, expected at least 1")
        self._num_samples, self._seed = num_samples, seed
        self._shuffled = dict[int, torch.Tensor]()  # by epoch

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """As `Order` has it."""
        end = min(start + count, self._num_samples)
        if self._seed is None:
            return range(start, end)
        if epoch not in self._shuffled:
            # One generator an epoch, so that any epoch can be gone on from without those before it.
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            self._shuffled[epoch] = torch.randperm(self._num_samples, generator=generator)
            if len(self._shuffled) > _KEPT:
                del self._shuffled[next(iter(self._shuffled))]
        return self._shuffled[epoch][start:end].tolist()
