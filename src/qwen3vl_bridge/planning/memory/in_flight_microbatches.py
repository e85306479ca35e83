"""How many microbatches a pipeline stage holds the activations of.

What lives here: the order of megatron-core's schedules, 1F1B (Narayanan et al., arXiv 2006.09503) and interleaved
(arXiv 2104.04473). Standard library only. What may not: bytes of a microbatch (`microbatch_activations.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qwen3vl_bridge.planning.split import Split


def most_in_flight(
    split: Split, stage: int, microbatches: int, chunks: Sequence[float]
) -> tuple[float, tuple[int, ...]]:
    """What a stage holds when it holds most.

    Args:
        split: the pipeline's stages and chunks.
        stage: a pipeline rank.
        microbatches: of a step.
        chunks: what a microbatch weighs in each of the stage's chunks.

    Returns:
        The weight of all, and how many microbatches of each chunk that is.
    """
    if len(chunks) == 1:
        count = min(split.pp - stage, microbatches)
        return count * chunks[0], (count,)
    best, held = (0.0, (0,) * len(chunks)), [0] * len(chunks)
    group = split.vpp_group or split.pp
    order = list(_order(microbatches, len(chunks), group))
    before = (split.pp - stage - 1) * 2 + (len(chunks) - 1) * group
    for step, chunk in enumerate(order):
        held[chunk] += 1
        weight = sum(n * each for n, each in zip(held, chunks, strict=True))
        best = max(best, (weight, tuple(held)))
        if step >= before:
            held[len(chunks) - 1 - order[step - before]] -= 1
    return best


def _order(microbatches: int, chunks: int, group: int) -> Iterator[int]:
    """The chunk of each forward pass; backward passes take the chunks the other way round."""
    for begin in range(0, microbatches, group):
        for chunk in range(chunks):
            yield from (chunk for _ in range(begin, min(begin + group, microbatches)))
