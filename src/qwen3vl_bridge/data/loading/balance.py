"""Assignment of rows to data-parallel ranks, so that all ranks have equal work.

Rows are assigned only within a global batch. So the gradient of a step is the sum over the same rows for every
assignment and number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_rows(costs: Sequence[float], ranks: int) -> list[int]:
    """The order in which the rows of a global batch are read; ranks read in turn.

    Ranks wait for each other at the end of a step, and with sharded parameters or experts in every microbatch. So the
    rows of a turn have similar costs, and within a turn the rank with the lowest total so far gets the most expensive
    row.

    Args:
        costs: of the batch's rows.
        ranks: number of ranks; rank r reads positions r, r + ranks, r + 2 * ranks, ...

    Returns:
        For each position, the index of the row that is read.

    Raises:
        ValueError: the number of rows is not a multiple of the number of ranks.
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
