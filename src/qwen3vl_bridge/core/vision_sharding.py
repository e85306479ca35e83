"""Assign the frames of a batch to ranks that encode them, and plan the exchange of vision tokens between ranks.

Context-parallel ranks have the same images and videos. Each rank encodes some of the frames (attention does not cross
frames) and sends the other ranks the vision tokens that they need. Separate vision ranks (dist-train) divide frames in
the same way. All ranks compute the same assignment, so they need not negotiate. An image is one frame.

Legend: F frames, N patches, M = N / merge^2 vision tokens.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

from qwen3vl_bridge.core.device_transfer import Transferable
from qwen3vl_bridge.core.vision_inputs import VisionInputs

import torch
from torch import Tensor

_BALANCED = 1.005  # the search ends if the highest cost is at most this many times the mean


@dataclass(frozen=True)
class VisionWork:
    """The cost of encoding a frame with n patches: patch * n + patch_pair * n^2, in any unit."""

    patch: float
    patch_pair: float
    patches_per_token: int  # patches per vision token

    def cost(self, patches: int) -> float:
        """Return the cost of encoding one frame with `patches` patches."""
        return self.patch * patches + self.patch_pair * patches**2


@dataclass(frozen=True)
class VisionAssignment:
    """The assignment of the frames of a batch to the ranks that encode them."""

    frames: tuple[tuple[int, ...], ...]  # indices of each rank's frames, ascending
    counts: tuple[int, ...]  # number of vision tokens of each rank's frames
    encoded_index: Tensor  # [M] int64, index of each vision token of the batch in the concatenated tokens of all ranks

    def select(self, vision: VisionInputs | None, rank: int) -> VisionInputs | None:
        """Return the vision inputs of the frames assigned to a rank; None if it has no frames."""
        if vision is None or len(self.frames) == 1:
            return vision
        return vision.select(self.frames[rank]) if self.frames[rank] else None


@dataclass(frozen=True)
class VisionExchange(Transferable):
    """The vision tokens that a rank sends to each rank and receives from each rank, including itself."""

    # int64, indices into the vision tokens that the rank encodes: first the tokens for rank 0, then for rank 1, ...
    sources: Tensor
    sent: tuple[int, ...]  # number of tokens sent to each rank
    received: tuple[int, ...]  # number of tokens received from each rank; they are concatenated by rank

    @classmethod
    def plan(cls, assignment: VisionAssignment, slots: Sequence[Tensor], rank: int) -> tuple[Self, Tensor]:
        """Plan the exchange so that each rank receives, exactly once, every vision token that it uses.

        Args:
            assignment: the frames that ranks encode.
            slots: for each rank, the vision slots of all tokens that it reads (`TokenBatch.vision_slot`). A slot may be
                -1 or occur several times.
            rank: the rank of the returned exchange.

        Returns:
            The exchange, and for each of the M vision tokens of the batch its index among the tokens that the rank
            receives (`received_index` in `TokenBatch.local`), [M] int64; undefined for tokens that it does not use.
        """
        used = torch.zeros(len(slots), len(assignment.encoded_index), dtype=torch.bool)  # in the order of encoding
        for used_by_rank, of_rank in zip(used, slots, strict=True):
            used_by_rank[assignment.encoded_index[of_rank[of_rank >= 0]]] = True
        sent = used.split(assignment.counts, 1)[rank]
        received = [int(from_rank.sum()) for from_rank in used[rank].split(assignment.counts)]
        exchange = cls(sent.nonzero()[:, 1], tuple(sent.sum(1).tolist()), tuple(received))
        return exchange, (used[rank].cumsum(0) - 1)[assignment.encoded_index]


def assign_frames(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign frames to ranks so that the highest total cost of a rank is low. Return each rank's frames, ascending.

    Longest-processing-time-first: each frame, in descending order of cost, goes to the rank with the lowest cost so
    far. Then frames are moved or swapped away from the rank with the highest cost while this lowers that cost. After
    the first step it is at most 4/3 - 1/(3 ranks) times the optimum. Source: Graham, Bounds on multiprocessing timing
    anomalies (1969).
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [(0.0, rank) for rank in range(ranks)]
    for frame in sorted(range(len(costs)), key=lambda frame: (-costs[frame], frame)):
        total, rank = totals[0]
        heapq.heapreplace(totals, (total + costs[frame], rank))
        shares[rank].append(frame)
    while _move_frame(shares, costs):
        pass
    return [sorted(share) for share in shares]


def _move_frame(shares: list[list[int]], costs: Sequence[float]) -> bool:
    """Move a frame away from the rank with the highest cost, or swap it for a cheaper frame of another rank.

    `shares`, the frames of each rank, is changed in place. Return False if nothing lowers the highest cost.
    """
    totals = [sum(costs[frame] for frame in share) for share in shares]
    most = max(range(len(shares)), key=totals.__getitem__)
    if totals[most] * len(shares) <= _BALANCED * sum(totals):
        return False
    best, swap = totals[most] * (1 - 1e-4), None  # ignores gains that are only rounding
    for rank, share in enumerate(shares):
        if rank == most:
            continue
        wanted = (totals[most] - totals[rank]) / 2
        candidates = [None, *sorted(share, key=costs.__getitem__)]  # frames to give back: none, or the cheapest first
        given_back = [0.0 if frame is None else costs[frame] for frame in candidates]
        for frame in shares[most]:
            after = bisect.bisect_left(given_back, costs[frame] - wanted)
            for i in range(max(after - 1, 0), min(after + 1, len(candidates))):  # the two nearest to `wanted`
                moved = costs[frame] - given_back[i]
                worst = max(totals[most] - moved, totals[rank] + moved)
                if worst < best:
                    best, swap = worst, (frame, rank, candidates[i])
    if swap is None:
        return False
    frame, rank, back = swap
    shares[most].remove(frame)
    shares[rank].append(frame)
    if back is not None:
        shares[rank].remove(back)
        shares[most].append(back)
    return True


def assign_vision(vision: VisionInputs | None, work: VisionWork, ranks: int) -> VisionAssignment:
    """Assign the frames of a batch to ranks so that the cost of encoding them is balanced; see `assign_frames`.

    Raises:
        ValueError: the number of patches of a frame is not a multiple of `patches_per_token`.
    """
    if vision is None:
        return VisionAssignment(((),) * ranks, (0,) * ranks, torch.empty(0, dtype=torch.int64))
    if any(patches % work.patches_per_token for patches in vision.lengths):
        raise ValueError(
            f"frames have {vision.lengths} patches, expected multiples of {work.patches_per_token}, the number of "
            "patches in a vision token: pass the grids that the processor returned"
        )
    shares = assign_frames([work.cost(patches) for patches in vision.lengths], ranks)
    tokens = [patches // work.patches_per_token for patches in vision.lengths]
    rows = torch.arange(sum(tokens)).split(tokens)
    order = torch.cat([rows[frame] for frame in chain(*shares)])
    encoded_index = torch.empty_like(order)
    encoded_index[order] = torch.arange(len(order))
    return VisionAssignment(
        frames=tuple(map(tuple, shares)),
        counts=tuple(sum(tokens[frame] for frame in share) for share in shares),
        encoded_index=encoded_index,
    )


@dataclass(frozen=True)
class VisionShard:
    """Size and checksum of the vision tokens of a microbatch that one vision rank sends to one language replica."""

    tokens: int  # number of vision tokens; 0 if the microbatch has no frames for this rank
    checksum: int  # 32-bit checksum of the samples, their tokens and the encoded frames
