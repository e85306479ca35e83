"""Which context-parallel rank encodes which frames of a batch, and which ranks are sent what it has encoded.

What lives here: assigning frames to ranks by what they cost the vision tower, where their tokens then lie, and which of
them each rank uses. Ranks are plain integers. What may not: which tokens a rank holds (`token_layout.py`), what a model
costs (`models/common/flops.py`), collectives (`parallel/collectives.py`).

Context-parallel ranks see the same pictures. Each encodes some of the frames, since attention does not cross one, and
sends the others what their tokens use of it.
Legend: F frames, N patches, M = N / merge^2 vision tokens.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

from qwen3vl_bridge.batch.device_transfer import Movable
from qwen3vl_bridge.batch.vision_inputs import VisionInputs, frame_rows

import torch
from torch import Tensor

_EVEN = 1.005  # a rank's cost over the mean, below which the search ends


@dataclass(frozen=True)
class VisionWork:
    """What a frame of n patches costs, patch * n + patch_pair * n^2, in any unit; and how many tokens it becomes."""

    patch: float
    patch_pair: float
    patches_per_token: int

    def cost(self, patches: int) -> float:
        """Of one frame."""
        return self.patch * patches + self.patch_pair * patches**2


@dataclass(frozen=True)
class VisionAssignment:
    """Which rank encodes which pictures.

    Attributes:
        frames: those of each rank, in their order.
        counts: vision tokens of every rank's frames.
        places: [M] int64, where each vision token of the batch lies among those of all ranks, one after the other.
    """

    frames: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    places: Tensor

    def part(self, vision: VisionInputs | None, rank: int) -> VisionInputs | None:
        """The pictures of a rank, as they were assigned; None if it has none."""
        if vision is None or len(self.frames) == 1:
            return vision
        return vision.select(self.frames[rank]) if self.frames[rank] else None


@dataclass(frozen=True)
class VisionExchange(Movable):
    """What one of several ranks sends of the vision tokens that it encodes, and what it is sent; itself is one of them.

    Attributes:
        rows: int64, of its own vision tokens those that it sends: the first rank's, in their order, then the second's.
        sent: how many of them go to each rank.
        received: how many come from each rank, which are one rank's after the other's, in their order there.
    """

    rows: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, assignment: VisionAssignment, slots: Sequence[Tensor], rank: int) -> tuple[Self, Tensor]:
        """What a rank sends and is sent, so that each has every vision token that it uses once.

        Args:
            assignment: of the pictures to ranks.
            slots: for each rank which vision tokens of the batch it uses, int64, in any order and any number of times;
                negative ones are none.
            rank: the one.

        Returns:
            The exchange, and [M] int64 where each vision token of the batch lies among those that the rank is sent,
            anywhere for one that it does not use.
        """
        used = torch.zeros(len(slots), len(assignment.places), dtype=torch.bool)  # in the order they are encoded in
        for row, own in zip(used, slots, strict=True):
            row[assignment.places[own[own >= 0]]] = True
        sent = used.split(assignment.counts, 1)[rank]
        counts = [int(part.sum()) for part in used[rank].split(assignment.counts)]
        exchange = cls(sent.nonzero()[:, 1], tuple(sent.sum(1).tolist()), tuple(counts))
        return exchange, (used[rank].cumsum(0) - 1)[assignment.places]


def assign_frames(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The frames of each rank, in their order.

    The costliest first, each to the rank that has the least so far; then the rank that has the most gives a frame away
    or exchanges one, for as long as that helps. The first half alone is at most 4/3 - 1/(3 ranks) of the best there is.
    Source: Graham, Bounds on multiprocessing timing anomalies (1969).
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [(0.0, rank) for rank in range(ranks)]
    for frame in sorted(range(len(costs)), key=lambda frame: (-costs[frame], frame)):
        total, rank = totals[0]
        heapq.heapreplace(totals, (total + costs[frame], rank))
        shares[rank].append(frame)
    while _exchange(shares, costs):
        pass
    return [sorted(share) for share in shares]


def _exchange(shares: list[list[int]], costs: Sequence[float]) -> bool:
    """Move a frame off the rank that has the most, for a cheaper one or for nothing; False where that is of no use."""
    totals = [sum(costs[frame] for frame in share) for share in shares]
    most = max(range(len(shares)), key=totals.__getitem__)
    if totals[most] * len(shares) <= _EVEN * sum(totals):
        return False
    best, swap = totals[most] * (1 - 1e-4), None  # less is not worth the search, and rounding alone would never end
    for rank, share in enumerate(shares):
        if rank == most:
            continue
        for place, back, moved in _candidates(shares[most], share, (totals[most] - totals[rank]) / 2, costs):
            worst = max(totals[most] - moved, totals[rank] + moved)
            if worst < best:
                best, swap = worst, (place, rank, back)
    if swap is None:
        return False
    place, rank, back = swap
    shares[rank].append(shares[most].pop(place))
    if back is not None:
        shares[rank].remove(back)
        shares[most].append(back)
    return True


def _candidates(
    share: Sequence[int], other: Sequence[int], wanted: float, costs: Sequence[float]
) -> Iterator[tuple[int, int | None, float]]:
    """For each frame of a share the two exchanges that move most nearly what makes both shares alike.

    Yields:
        The frame's place, the frame that comes back for it or None, and the cost that is moved.
    """
    cheapest_first = sorted(other, key=costs.__getitem__)
    theirs = [0.0, *(costs[frame] for frame in cheapest_first)]
    for place, frame in enumerate(share):
        after = bisect.bisect_left(theirs, costs[frame] - wanted)
        for i in range(max(after - 1, 0), min(after + 1, len(theirs))):
            yield place, cheapest_first[i - 1] if i else None, costs[frame] - theirs[i]


def assign_vision(vision: VisionInputs | None, work: VisionWork, ranks: int) -> VisionAssignment:
    """Assign the pictures of a batch to ranks.

    Args:
        vision: all pictures, or None for none.
        work: what they cost.
        ranks: how many share them.

    Raises:
        ValueError: a frame that is no whole number of vision tokens.
    """
    if vision is None:
        return VisionAssignment(((),) * ranks, (0,) * ranks, torch.empty(0, dtype=torch.int64))
    if any(patches % work.patches_per_token for patches in vision.lengths):
        raise ValueError(f"frames have {vision.lengths} patches, expected multiples of {work.patches_per_token}")
    shares = assign_frames([work.cost(patches) for patches in vision.lengths], ranks)
    tokens = [patches // work.patches_per_token for patches in vision.lengths]
    order = frame_rows(tokens, list(chain(*shares)))
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return VisionAssignment(
        frames=tuple(map(tuple, shares)),
        counts=tuple(sum(tokens[frame] for frame in share) for share in shares),
        places=places,
    )
