"""Gather rows and labels that the caller has already divided over context-parallel ranks.

RL frameworks divide a packed row before they call the model, by the same rule as `token_index`, and keep the offsets of
the full row. Positions and vision inputs need the full row, because a slice may contain only a part of an image.
Multi-token prediction needs all labels, because the next token of a chunk's last token is on another rank.

Legend: cp context-parallel ranks, T tokens of the full row, n = T / cp tokens of a slice.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.core.collectives import gather_objects, gather_stacked
from qwen3vl_bridge.core.device_transfer import copy_to_device, to_host
from qwen3vl_bridge.core.layout import SequenceLayout, inverse_token_index

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def _gather(slices: Mapping[str, Tensor], group: ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """Gather named slices [..., n] of all ranks to [ranks, ..., n], int64 or float32, on the host."""
    gathered = {}
    for name, values in slices.items():
        values = copy_to_device(values, device)
        gathered[name] = gather_stacked(values.float() if values.is_floating_point() else values.long(), group)
    return to_host(gathered)


def gather_labels(
    labels: Tensor, loss_mask: Tensor | None, layout: SequenceLayout, group: ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return labels and loss mask of the full batch, gathered from the slices of all context-parallel ranks.

    Call `check_ranks_agree` first.
    """
    given = {"labels": labels} if loss_mask is None else {"labels": labels, "loss_mask": loss_mask}
    index = inverse_token_index(layout, group.size())
    full = {name: x.flatten()[index].view(layout.num_rows, -1) for name, x in _gather(given, group, device).items()}
    return full["labels"], full.get("loss_mask")


def check_ranks_agree(
    given: Mapping[str, Tensor | None], layout: SequenceLayout | None, group: ProcessGroup, device: torch.device
) -> None:
    """Raise ValueError on all ranks if ranks pass different arguments, shapes of arguments, or layouts.

    All ranks of the group must call this together. Without the check, later collectives would hang.
    """
    if group.size() == 1:
        return  # without synchronizing with the device
    own: dict[str, Any] = {"packed_seq_params": layout and (layout.lengths, layout.padded_lengths)}
    for name, values in given.items():
        kind = "floating point" if values is not None and values.is_floating_point() else "integers"
        own[name] = None if values is None else f"{list(values.shape)} {kind}"
    checksum = torch.tensor([zlib.crc32(repr(own).encode())])
    if len(set(gather_stacked(copy_to_device(checksum, device), group).flatten().tolist())) == 1:
        return
    first, *others = gather_objects(own, group)
    for rank, theirs in enumerate(others, 1):
        if theirs["packed_seq_params"] != first["packed_seq_params"]:
            raise ValueError(
                f"packed_seq_params of context-parallel rank {rank} has other segments than that of rank 0. Give "
                "the offsets of the same full row on every rank, and each rank's share of the row"
            )
        for name in given:
            if theirs[name] != first[name]:
                raise ValueError(
                    f"{name} is {theirs[name]} on context-parallel rank {rank} and {first[name]} on rank 0; expected "
                    "the same on every rank: the rank's slice of tokens and labels, and the images and videos of the "
                    "full row"
                )


_OF_TOKENS = ("input_ids", "position_ids", "attention_mask", "padding_mask")
_PER_TOKEN = (*_OF_TOKENS, "labels", "loss_mask")
_PIXELS_AND_GRIDS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def gather_row(arguments: Mapping[str, Any], layout: SequenceLayout, group: ProcessGroup) -> dict[str, Tensor]:
    """Gather the arguments that are context-parallel slices [..., n], and return full rows [..., cp * n] on the host.

    All ranks of the group must call this together, each with its slice of the same row, and with the pixels and grids
    of the full row. All ranks raise if names, shapes or offsets differ between them.

    Args:
        arguments: as for `as_model_inputs`, by name; input_ids on the device of the group's collectives. Slices:
            input_ids, labels, loss_mask and masks [1, n]; position_ids [3, 1, n], [4, 1, n] or [1, n].
        layout: layout of the full row.
        group: context-parallel ranks.

    Returns:
        The full rows by name of the argument; empty if every rank has passed the full row.

    Raises:
        ValueError: segments that are not divisible into 2 * cp chunks, slices with other shapes, ranks that pass
            different arguments or offsets.
    """
    device, shape = arguments["input_ids"].device, arguments["input_ids"].shape
    check_ranks_agree({name: arguments.get(name) for name in _PER_TOKEN + _PIXELS_AND_GRIDS}, layout, group, device)
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
    index = inverse_token_index(layout, group.size())
    return {name: values.movedim(0, -2).flatten(-2)[..., index] for name, values in slices.items()}
