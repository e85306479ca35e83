"""Which data-parallel rank reads which row, so that all have as much to do.

What lives here: assigning rows by their cost. Plain numbers. What may not: what a row costs
(`models/common/flops.py`), reading.

Rows are assigned within a global batch only. So the gradient of a step is the sum over the same rows whoever reads
which, at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_rows(costs: Sequence[float], ranks: int) -> list[int]:
    """In which order the rows of a global batch are read, where ranks take turns.

    Ranks wait for each other at the end of a step, and where parameters or experts are sharded, in every microbatch.
    So the rows of a turn are neighbours by cost, and within a turn the rank that has had the least gets the most.

    Args:
        costs: of the batch's rows.
        ranks: how many ranks there are; rank r reads places r, r + ranks, r + 2 * ranks, ...

    Returns:
        For each place, the row that is read there.

    Raises:
        ValueError: the rows don't go round.
    """
    if ranks < 1 or len(costs) % ranks:
        raise ValueError(f"found {len(costs)} rows to assign to {ranks} ranks, expected a multiple of the ranks")
    if ranks == 1:
        return list(range(len(costs)))
    falling = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    totals, order = [0.0] * ranks, list[int]()
    for turn in range(0, len(costs), ranks):
        hungriest_first = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        hand = dict(zip(hungriest_first, falling[turn : turn + ranks], strict=True))
        for rank in range(ranks):
            totals[rank] += costs[hand[rank]]
            order.append(hand[rank])
    return order
