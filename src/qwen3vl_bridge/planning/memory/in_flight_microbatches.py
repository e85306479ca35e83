"""Number of microbatches whose activations a pipeline stage holds.

What lives here: the order of megatron-core's schedules, 1F1B (Narayanan et al., arXiv 2006.09503) and interleaved
(arXiv 2104.04473). Standard library only. What may not: bytes of a microbatch (`microbatch_activations.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qwen3vl_bridge.planning.split import Split


def most_in_flight(
    split: Split, stage: int, microbatches: int, chunks: Sequence[float]
) -> tuple[float, tuple[int, ...]]:
    """The peak of a stage.

    Args:
        split: the pipeline's stages and chunks.
        stage: a pipeline rank.
        microbatches: of a step.
        chunks: bytes of a microbatch in each of the stage's chunks.

    Returns:
        Bytes of all, and the number of microbatches of each chunk.
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
    """The chunk of each forward pass; backward passes use the chunks in reverse order."""
    for begin in range(0, microbatches, group):
        for chunk in range(chunks):
            yield from (chunk for _ in range(begin, min(begin + group, microbatches)))
