"""Comparing and gathering the arguments that context-parallel ranks pass to the same call.

What lives here: the check that all ranks pass the same arguments, and the all-gather of one argument's slices. What may
not: which arguments are slices (`precut_rows.py`, `labels.py`), the collective (`parallel/collectives.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from qwen3vl_bridge.batch import SequenceLayout
from qwen3vl_bridge.batch.device_transfer import sent
from qwen3vl_bridge.parallel.collectives import gather_stacked

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_NUMBERS = 6  # integers that describe one argument in the comparison


def gather_slices(values: Tensor, group: ProcessGroup) -> Tensor:
    """[..., n] of each rank -> [cp, ..., n] of all ranks, as int64 or float32."""
    return gather_stacked(values.float() if values.is_floating_point() else values.long(), group)


def check_agreement(
    given: Mapping[str, Tensor | None], layout: SequenceLayout | None, group: ProcessGroup, device: torch.device
) -> None:
    """Refuse arguments that differ between ranks. All ranks raise, since later collectives would hang.

    Args:
        given: arguments by name; which of them are given and their shapes are compared.
        layout: layout of the whole row given by the offsets, or None.
        group: context-parallel ranks, all of which call this function together.
        device: device of the group's collectives.

    Raises:
        ValueError: the arguments of a rank differ from those of rank 0.
    """
    if group.size() == 1:
        return  # no device synchronization
    lengths = layout and (layout.lengths, layout.padded_lengths)
    offsets = [hash(lengths) if lengths else -1] * _NUMBERS  # hash of integers: the same in every process
    own = [offsets, *(_description(values) for values in given.values())]
    everyone = gather_stacked(sent(torch.tensor(own), device), group).tolist()
    for rank, theirs in enumerate(everyone):
        if theirs[0] != everyone[0][0]:
            raise ValueError(
                f"packed_seq_params of context-parallel rank {rank} has other segments than that of rank 0; expected "
                "the offsets of one whole row on every rank, each with its share of it"
            )
        for name, found, first in zip(given, theirs[1:], everyone[0][1:], strict=True):
            if found != first:
                raise ValueError(
                    f"{name} is {_words(found)} on context-parallel rank {rank} and {_words(first)} on rank 0; "
                    "expected the same arguments on every rank: its share of what is cut, and the images and videos of "
                    "the whole row"
                )


def _description(values: Tensor | None) -> list[int]:
    """Number of dimensions, whether floating point, and sizes, padded to the same length for every argument."""
    if values is None:
        return [-1] * _NUMBERS
    return [values.dim(), int(values.is_floating_point()), *values.shape, *[0] * _NUMBERS][:_NUMBERS]


def _words(description: list[int]) -> str:
    dimensions, floating, *shape = description
    if dimensions < 0:
        return "None"
    return f"{shape[:dimensions]} {'floating point' if floating else 'integers'}"
