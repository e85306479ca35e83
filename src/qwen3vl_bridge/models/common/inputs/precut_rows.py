"""Rows that context-parallel ranks have shared out before the model: the whole row, put together again.

What lives here: how a share is told from a whole row, and each argument of the whole row from those of the shares. What
may not: which tokens a rank holds (`batch/token_layout.py`), the collective (`parallel/collectives.py`), what arguments
mean (`model_inputs.py`), whether ranks give the same ones (`agreement.py`).

RL frameworks cut a packed row before they call the model, by the same rule as `token_index`, and keep the offsets of
the whole row. Positions and pictures need the whole row: a rank's share has pieces of pictures.
Legend: cp context-parallel ranks, T tokens of the whole row, n = T / cp of them in a share.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.batch import SequenceLayout, gathered_index
from qwen3vl_bridge.batch.device_transfer import on_host
from qwen3vl_bridge.models.common.inputs.agreement import check_agreement, gather_share
from qwen3vl_bridge.models.common.inputs.masks import packed_layout, segment_lengths
from qwen3vl_bridge.models.common.inputs.reading import arguments_on_host

from torch import Tensor
from torch.distributed import ProcessGroup

_OF_TOKENS = ("input_ids", "position_ids", "attention_mask", "padding_mask")
_PER_TOKEN = (*_OF_TOKENS, "labels", "loss_mask")
_PICTURES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def with_whole_row(arguments: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """The arguments of a call on the host, see `arguments_on_host`, those of a share replaced by the whole row's.

    A share is told by lengths: one row [1, n] with `packed_seq_params`, whose physical lengths add up to cp * n. A row
    that every rank gives whole can have such lengths too, if padding rounds its one segment up so far; then every rank
    has the same tokens, and the same masks and positions, if any. Where all tokens are one and the same, that
    tells nothing: a row with a mask is whole then, and one without is a share.

    What is assumed: all ranks of the group call together, each with its share of the same row, and give the same
    pictures and grids, those of the whole row. Which arguments there are, their shapes and the offsets are compared,
    and nothing that only one rank sees is looked at before: so where they differ, every rank raises. A rank whose own
    tokens are not T / cp, or whose offsets contradict themselves, is the exception: it raises alone, as it would with a
    whole row. Pixels and the entries of grids are not compared.

    Args:
        arguments: as for `inputs.as_model_inputs`, by name. Of a share [1, n]: input_ids and, where they are given,
            labels, loss_mask, attention_mask and padding_mask; position_ids [3, 1, n], [4, 1, n] or [1, n].
            input_ids has to be on the device that the group talks over, as the model is.
        group: context-parallel ranks.

    Returns:
        The arguments; those of a share with T for n, integers as int64 and the rest as float32. The host waits once to
        read them; for a share once more to compare arguments, and once for the whole row's.

    Raises:
        ValueError: segments that don't divide into 2 * cp chunks, shares of other shapes, ranks that don't give the
            same arguments and offsets.
    """
    read = arguments_on_host(arguments)
    layout = _layout_of_share(read["input_ids"], read.get("packed_seq_params"), group.size())
    if layout is None:
        return read
    device = arguments["input_ids"].device
    check_agreement({name: arguments.get(name) for name in _PER_TOKEN + _PICTURES}, layout, group, device)
    given = {name: values for name in _PER_TOKEN if (values := arguments.get(name)) is not None}
    fitting = {name: values for name, values in given.items() if _fits(values, given)}
    shares = on_host({name: gather_share(values.to(device), group) for name, values in fitting.items()})
    if _are_whole(shares, given, layout):
        return read
    _check_shapes(given, layout)
    index = gathered_index(layout, group.size())
    return read | {name: values.movedim(0, -2).flatten(-2)[..., index] for name, values in shares.items()}


def _layout_of_share(ids: Tensor | None, packed: Any, cp_size: int) -> SequenceLayout | None:
    """The layout of the whole row if `ids` is a share of it."""
    if cp_size == 1 or packed is None or ids is None or ids.dim() != 2 or len(ids) != 1 or not ids.numel():
        return None
    logical, physical = segment_lengths(packed)
    if int(physical.sum()) != cp_size * ids.shape[1]:
        return None
    return packed_layout(logical, physical)


def _fits(values: Tensor, given: dict[str, Tensor]) -> bool:
    """Whether values are as many as the share's tokens."""
    return values.shape[-2:] == given["input_ids"].shape


def _check_shapes(given: dict[str, Tensor], layout: SequenceLayout) -> None:
    """Refuses values that are not as many as the share's tokens."""
    for name, values in given.items():
        if not _fits(values, given):
            axes, tokens = "3, " if name == "position_ids" else "", given["input_ids"].shape[-1]
            raise ValueError(
                f"{name} has shape {list(values.shape)}, expected [{axes}1, {tokens}]: input_ids is one "
                f"context-parallel rank's share of a row of {layout.total} tokens, so {name} has to be its share too"
            )


def _are_whole(shares: dict[str, Tensor], given: dict[str, Tensor], layout: SequenceLayout) -> bool:
    """Whether ranks, whose token ids are [cp, 1, n], give one and the same row and not their shares of one."""
    ids, masks = shares["input_ids"], {"attention_mask", "padding_mask"} & given.keys()
    if len(layout.lengths) > 1 or (not masks and (ids == ids[0, 0, 0]).all()):
        return False
    return not any(bool((values != values[0]).any()) for name, values in shares.items() if name in _OF_TOKENS)
