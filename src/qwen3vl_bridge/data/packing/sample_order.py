"""The order in which an epoch reads its samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor
from typing import Protocol, runtime_checkable

import torch

_KEPT = 2  # epochs: a window may extend over an epoch's end
_SEEDS = 1_000_003  # distance of seeds, so that epochs of one seed are not those of the next


@runtime_checkable
class Order(Protocol):
    """Samples by their position in an epoch; equal in every process."""

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """Numbers of the samples at positions `start` to `start + count - 1`; fewer, or none, if the epoch ends.

        Args:
            epoch: the pass over the samples.
            start: the first position.
            count: number of positions.
        """
        ...


class NumberedOrder(Order):
    """Samples 0 to n - 1, in numerical or in random order, different in each epoch."""

    def __init__(self, num_samples: int, seed: int | None = None) -> None:
        """Order samples.

        Args:
            num_samples: n.
            seed: of the order; None for numerical order.

        Raises:
            ValueError: no samples.
        """
        if num_samples < 1:
            raise ValueError(f"found {num_samples} samples, expected at least 1")
        self._num_samples, self._seed = num_samples, seed
        self._shuffled = dict[int, torch.Tensor]()  # by epoch

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """See `Order`."""
        end = min(start + count, self._num_samples)
        if self._seed is None:
            return range(start, end)
        if epoch not in self._shuffled:
            # One generator per epoch, so that any epoch can be resumed without the previous ones.
            generator = torch.Generator().manual_seed((self._seed * _SEEDS + epoch) % 2**63)
            self._shuffled[epoch] = _narrow(torch.randperm(self._num_samples, generator=generator))
            if len(self._shuffled) > _KEPT:
                del self._shuffled[next(iter(self._shuffled))]
        return self._shuffled[epoch][start:end].tolist()


class MixedOrder(Order):
    """Samples of several data sets, numbered one data set after the other, with a given number per epoch from each.

    A data set is read pass after pass, each sample once per pass and each pass in a different order; an epoch takes the
    next part of that. So after any number of epochs all samples of a data set have been read equally often, or once
    more than others, also if an epoch takes 0.3 or 2.5 times the data set.

    Within an epoch, the k-th of n samples of a data set has a time drawn from [k / n, (k + 1) / n), or the middle of it
    without a seed, and samples are sorted by time. So the shares of data sets hold in every part of the epoch.
    """

    def __init__(self, lengths: Sequence[int], taken: Sequence[Fraction], seed: int | None = None) -> None:
        """Order samples.

        Args:
            lengths: number of samples of each data set.
            taken: number of samples of each data set per epoch, on average if it is not an integer.
            seed: of the order; None for numerical order within each data set.

        Raises:
            ValueError: a data set without samples or with a share of none, or so small shares that an epoch may be
                empty.
        """
        if any(number <= 0 for number in taken) or sum(map(floor, taken)) < 1:
            found = ", ".join(f"{float(number):g} of {length}" for number, length in zip(taken, lengths, strict=True))
            raise ValueError(
                f"found epochs that take {found} samples, expected more than 0 of each and 1 of one at least"
            )
        self._lengths, self._taken, self._seed = tuple(lengths), tuple(taken), seed
        self._firsts = [0, *accumulate(lengths)]
        seeds = [None if seed is None else seed * _SEEDS + number for number in range(len(lengths))]
        self._sets = [NumberedOrder(length, own) for length, own in zip(lengths, seeds, strict=True)]
        self._merged = dict[int, torch.Tensor]()  # by epoch

    def numbers(self, epoch: int, start: int, count: int) -> Sequence[int]:
        """See `Order`."""
        begun, ended = self._passed(epoch), self._passed(epoch + 1)
        before = [0, *accumulate(end - begin for begin, end in zip(begun, ended, strict=True))]
        found = []
        for drawn in self._merged_of(epoch, before)[start : start + count].tolist():
            number = bisect_right(before, drawn) - 1  # skips data sets without samples
            passed, place = divmod(begun[number] + drawn - before[number], self._lengths[number])
            found.append(self._firsts[number] + self._sets[number].numbers(passed, place, 1)[0])
        return found

    def _passed(self, epoch: int) -> list[int]:
        """Number of samples of each data set that were read before an epoch."""
        return [floor(epoch * number) for number in self._taken]

    def _merged_of(self, epoch: int, before: Sequence[int]) -> torch.Tensor:
        """[samples] int32, or int64 from 2**31 on: the epoch's samples by their times, numbered by data set."""
        if epoch not in self._merged:
            counts = [end - begin for begin, end in pairwise(before)]
            within = torch.full((before[-1],), 0.5, dtype=torch.float64)
            if self._seed is not None:
                generator = torch.Generator().manual_seed((self._seed * _SEEDS * _SEEDS + epoch - _SEEDS) % 2**63)
                within = torch.rand(before[-1], dtype=torch.float64, generator=generator)
            parts = zip(within.split(counts), counts, strict=True)
            times = torch.cat([(torch.arange(count, dtype=torch.float64) + part) / count for part, count in parts])
            self._merged[epoch] = _narrow(times.argsort(stable=True))
            if len(self._merged) > _KEPT:
                del self._merged[next(iter(self._merged))]
        return self._merged[epoch]


def _narrow(order: torch.Tensor) -> torch.Tensor:
    """[samples] int32, or int64 from 2**31 on: every process keeps the order of a whole epoch."""
    return order.int() if len(order) < 2**31 else order
