"""Rows that the caller has already split over context-parallel ranks: gathering the whole row, if all ranks agree.

RL frameworks split a packed row before they call the model, with the same rule as `token_index`, and keep the offsets
of the whole row. Positions and vision inputs need the whole row, because a slice may contain only a part of an image.
Legend: cp context-parallel ranks, T tokens of the whole row, n = T / cp of them in a slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.batch import SequenceLayout, gathered_index
from qwen3vl_bridge.batch.device_transfer import on_host, sent
from qwen3vl_bridge.models.caller_masks import arguments_on_host, packed_layout, segment_lengths
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
    """Refuse arguments that differ between context-parallel ranks: which are given, their shapes, a row's layout.

    All ranks of the group call this together, and all raise ValueError, since later collectives would hang.
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


_OF_TOKENS = ("input_ids", "position_ids", "attention_mask", "padding_mask")
_PER_TOKEN = (*_OF_TOKENS, "labels", "loss_mask")
_PICTURES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def with_whole_row(arguments: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """The arguments of a call on the host, see `arguments_on_host`, with slices replaced by the whole row.

    A slice is detected by lengths: one row [1, n] with `packed_seq_params` whose physical lengths add up to cp * n. A
    row that every rank passes whole can have such lengths too, if padding rounds its only segment up that far; then
    every rank has the same tokens, and the same masks and positions, if any. If all tokens are identical, this is
    ambiguous: a row with a mask is then taken as whole, and one without as a slice.

    Assumptions: all ranks of the group call together, each with its slice of the same row, and pass the same pixels and
    grids, those of the whole row. Which arguments are given, their shapes and the offsets are compared before anything
    that differs between ranks is read, so that every rank raises if they differ. There is one exception: if a rank's
    number of tokens is not T / cp, or its offsets are inconsistent, only this rank raises, as it would with a whole
    row. Pixels and the values of grids are not compared.

    Args:
        arguments: as for `inputs.as_model_inputs`, by name. Slices [1, n]: input_ids and, if given, labels, loss_mask,
            attention_mask and padding_mask; position_ids [3, 1, n], [4, 1, n] or [1, n]. input_ids has to be on the
            device of the group's collectives, like the model.
        group: context-parallel ranks.

    Returns:
        The arguments; those of a slice with T instead of n, integers as int64 and others as float32. The host
        synchronizes once to read them; for a slice once more to compare arguments, and once to read the whole row.

    Raises:
        ValueError: segments that are not divisible into 2 * cp chunks, slices with other shapes, ranks that pass
            different arguments or offsets.
    """
    read = arguments_on_host(arguments)
    layout = _layout_of_slice(read["input_ids"], read.get("packed_seq_params"), group.size())
    if layout is None:
        return read
    device = arguments["input_ids"].device
    check_agreement({name: arguments.get(name) for name in _PER_TOKEN + _PICTURES}, layout, group, device)
    given = {name: values for name in _PER_TOKEN if (values := arguments.get(name)) is not None}
    fitting = {name: values for name, values in given.items() if _fits(values, given)}
    slices = on_host({name: gather_slices(values.to(device), group) for name, values in fitting.items()})
    if _are_whole(slices, given, layout):
        return read
    _check_shapes(given, layout)
    index = gathered_index(layout, group.size())
    return read | {name: values.movedim(0, -2).flatten(-2)[..., index] for name, values in slices.items()}


def _layout_of_slice(ids: Tensor | None, packed: Any, cp_size: int) -> SequenceLayout | None:
    """The layout of the whole row if `ids` is a slice of it."""
    if cp_size == 1 or packed is None or ids is None or ids.dim() != 2 or len(ids) != 1 or not ids.numel():
        return None
    logical, physical = segment_lengths(packed)
    if int(physical.sum()) != cp_size * ids.shape[1]:
        return None
    return packed_layout(logical, physical)


def _fits(values: Tensor, given: dict[str, Tensor]) -> bool:
    """Whether the number of values equals the number of the slice's tokens."""
    return values.shape[-2:] == given["input_ids"].shape


def _check_shapes(given: dict[str, Tensor], layout: SequenceLayout) -> None:
    """Refuse values whose number differs from that of the slice's tokens."""
    for name, values in given.items():
        if not _fits(values, given):
            axes, tokens = "3, " if name == "position_ids" else "", given["input_ids"].shape[-1]
            raise ValueError(
                f"{name} has shape {list(values.shape)}, expected [{axes}1, {tokens}]: input_ids is one "
                f"context-parallel rank's slice of a row of {layout.total} tokens, so {name} has to be its slice too"
            )


def _are_whole(slices: dict[str, Tensor], given: dict[str, Tensor], layout: SequenceLayout) -> bool:
    """Whether the ranks' token ids [cp, 1, n] are the same whole row rather than slices of one."""
    ids, masks = slices["input_ids"], {"attention_mask", "padding_mask"} & given.keys()
    if len(layout.lengths) > 1 or (not masks and (ids == ids[0, 0, 0]).all()):
        return False
    return not any(bool((values != values[0]).any()) for name, values in slices.items() if name in _OF_TOKENS)
