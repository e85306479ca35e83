"""Rows and labels that the caller has already split over context-parallel ranks: gathered, if all ranks agree.

RL frameworks split a packed row before they call the model, with the same rule as `token_index`, and keep the offsets
of the whole row. Positions and vision inputs need the whole row, because a slice may contain only a part of an image;
multi-token prediction needs all labels, because the next token of a chunk's last one is on another rank.
Legend: cp context-parallel ranks, T tokens of the whole row, n = T / cp of them in a slice.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.batch import SequenceLayout, gathered_index
from qwen3vl_bridge.batch.device_transfer import on_host, sent
from qwen3vl_bridge.parallel.collectives import gather_objects, gather_stacked

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def _gather(slices: Mapping[str, Tensor], group: ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """Slices [..., n] -> [cp, ..., n] of all ranks, int64 or float32, read by the host in one wait."""
    gathered = {}
    for name, values in slices.items():
        values = sent(values, device)
        gathered[name] = gather_stacked(values.float() if values.is_floating_point() else values.long(), group)
    return on_host(gathered)


def gather_labels(
    labels: Tensor, loss_mask: Tensor | None, layout: SequenceLayout, group: ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Labels and mask [B, S] of the whole batch, from each rank's [b, s], which have passed `check_agreement`."""
    given = {"labels": labels} if loss_mask is None else {"labels": labels, "loss_mask": loss_mask}
    index = gathered_index(layout, group.size())
    whole = {name: x.flatten()[index].view(layout.num_rows, -1) for name, x in _gather(given, group, device).items()}
    return whole["labels"], whole.get("loss_mask")


def check_agreement(
    given: Mapping[str, Tensor | None], layout: SequenceLayout | None, group: ProcessGroup, device: torch.device
) -> None:
    """Refuse arguments that differ between context-parallel ranks: which are given, their shapes, a row's layout.

    All ranks of the group call this together, and all raise ValueError, since later collectives would hang.
    """
    if group.size() == 1:
        return  # no device synchronization
    own: dict[str, Any] = {"packed_seq_params": layout and (layout.lengths, layout.padded_lengths)}
    for name, values in given.items():
        kind = "floating point" if values is not None and values.is_floating_point() else "integers"
        own[name] = None if values is None else f"{list(values.shape)} {kind}"
    checksum = torch.tensor([zlib.crc32(repr(own).encode())])
    if len(set(gather_stacked(sent(checksum, device), group).flatten().tolist())) == 1:
        return
    first, *others = gather_objects(own, group)
    for rank, theirs in enumerate(others, 1):
        if theirs["packed_seq_params"] != first["packed_seq_params"]:
            raise ValueError(
                f"packed_seq_params of context-parallel rank {rank} has other segments than that of rank 0; expected "
                "the offsets of one whole row on every rank, each with its share of it"
            )
        for name in given:
            if theirs[name] != first[name]:
                raise ValueError(
                    f"{name} is {theirs[name]} on context-parallel rank {rank} and {first[name]} on rank 0; expected "
                    "the same arguments on every rank: its share of what is cut, and the images and videos of the "
                    "whole row"
                )


_OF_TOKENS = ("input_ids", "position_ids", "attention_mask", "padding_mask")
_PER_TOKEN = (*_OF_TOKENS, "labels", "loss_mask")
_PICTURES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def whole_row(arguments: Mapping[str, Any], layout: SequenceLayout, group: ProcessGroup) -> dict[str, Tensor]:
    """The arguments that are slices [..., n] of a row with this layout, whole and on the host, [..., T].

    A row that every rank passes whole can be as short as a slice, if padding rounds its only segment up that far; then
    every rank has the same tokens, masks and positions, and the result is empty. If all tokens are identical, this is
    ambiguous: a row with a mask is then taken as whole, and one without as a slice.

    All ranks of the group call together, each with its slice of the same row, and pass the same pixels and grids, those
    of the whole row. Which arguments are given, their shapes and the offsets are compared before anything that differs
    between ranks is read, so that every rank raises if they differ; except that if a rank's number of tokens is not
    T / cp, or its offsets are inconsistent, only this rank raises. Pixels and values of grids are not compared.

    Args:
        arguments: as for `as_model_inputs`, by name; input_ids on the device of the group's collectives. Slices:
            input_ids, labels, loss_mask and masks [1, n]; position_ids [3, 1, n], [4, 1, n] or [1, n].
        layout: of the whole row.
        group: context-parallel ranks.

    Raises:
        ValueError: segments that are not divisible into 2 * cp chunks, slices with other shapes, ranks that pass
            different arguments or offsets.
    """
    device, shape = arguments["input_ids"].device, arguments["input_ids"].shape
    check_agreement({name: arguments.get(name) for name in _PER_TOKEN + _PICTURES}, layout, group, device)
    given = {name: values for name in _PER_TOKEN if (values := arguments.get(name)) is not None}
    slices = _gather({name: values for name, values in given.items() if values.shape[-2:] == shape}, group, device)
    ids, masks = slices["input_ids"], {"attention_mask", "padding_mask"} & given.keys()
    differs = any((slices[name] != slices[name][0]).any() for name in _OF_TOKENS if name in slices)
    if len(layout.lengths) == 1 and not differs and (masks or (ids != ids[0, 0, 0]).any()):
        return {}
    for name in given:
        if name not in slices:
            axes = "3, " if name == "position_ids" else ""
            raise ValueError(
                f"{name} has shape {list(given[name].shape)}, expected [{axes}1, {shape[-1]}]: input_ids is one "
                f"context-parallel rank's slice of a row of {layout.total} tokens, so {name} has to be its slice too"
            )
    index = gathered_index(layout, group.size())
    return {name: values.movedim(0, -2).flatten(-2)[..., index] for name, values in slices.items()}
